"""How soon the second look at a stall follows the first."""

from __future__ import annotations

import pytest

from echelon.launcher.control import messages as m
from echelon.launcher.incident.harvest import second_look_s
from echelon.launcher.incident.worker import Occasion
from echelon.launcher.node import examination


@pytest.mark.parametrize(
    ("stall_timeout_s", "gap_s"), [(300.0, 2.0), (8.0, 2.0), (3.0, 0.75), (1.0, 0.5), (0.0, 2.0)]
)
def test_it_follows_sooner_where_stalls_are_judged_sooner(stall_timeout_s, gap_s):
    assert second_look_s(stall_timeout_s) == gap_s


def test_an_examination_waits_that_long_between_its_looks(monkeypatch):
    gaps = []

    def steps(workers, occasion, is_urgent, gap_s):
        gaps.append(gap_s)
        return iter(())

    monkeypatch.setattr(examination, "harvest_steps", steps)
    occasion = Occasion(kind="stall", attempt=0, world_size=1, job_id="job", oom_kills_before=None)
    examination.Examination(m.Collect(incident=0, kind="stall", reason="slow"), [], occasion, 0.75)
    assert gaps == [0.75]
