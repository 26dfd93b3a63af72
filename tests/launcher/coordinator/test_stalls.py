"""Which stalls end their ranks at once, and which get time to end by themselves. Pure."""

from __future__ import annotations

from pathlib import Path

import pytest

from echelon.launcher.coordinator.decide import StallExamined
from echelon.launcher.coordinator.roster import Node
from echelon.launcher.coordinator.stalls import VERDICT_S, Stalls
from echelon.launcher.coordinator.world import World
from echelon.launcher.job.report import Incident
from echelon.launcher.options.options import parse

_RESTART = ("--on-stall", "restart", "--stall-timeout", "10", "--max-restarts", "3")


class _Job:
    """A stall that was examined, and what it was followed by."""

    def __init__(self, *argv: str) -> None:
        self.options = parse([*argv, "--no-python", "true"], {})
        self.waits = True
        self.ended: list[bool] = []
        self.said = ""
        node = Node(name="a", host="a", num_workers=2)
        self.world, _ = World.of(
            [node], number=0, grace_s=1.0, stop_on_stall=True, stall_timeout_s=10.0
        )
        self.incident = Incident(Path("incident_0"), "stall", 0, "slow")
        self.stalls = Stalls(self.options, lambda _: self.waits, self._end, self._say)

    def _end(self, world: World, event: StallExamined) -> None:
        self.ended.append(event.lasts)

    def _say(self, text: str) -> None:
        self.said += text

    def explain(self, cause: str) -> None:
        self.waits = False
        self.incident.verdict = {"cause": cause, "culprit_ranks": [1], "confidence": "certain"}

    def begin(self, *, lasts: bool = True) -> None:
        self.stalls.on_examined(self.world, StallExamined(lasts=lasts), self.incident, 0.0)


@pytest.fixture
def job() -> _Job:
    return _Job(*_RESTART)


@pytest.mark.parametrize(
    "cause", ["straggler", "network", "storage_stall", "compile_stall", "unknown"]
)
def test_a_stall_that_may_pass_has_three_stall_timeouts_to_do_so(job, cause):
    job.begin()
    job.explain(cause)
    job.stalls.step(1.0)
    job.stalls.step(30.9)
    assert job.ended == []
    assert "may pass" in job.said
    job.stalls.step(job.stalls.deadline_s())
    assert job.ended == [True]
    job.stalls.step(1000.0)
    assert job.ended == [True], "it ended twice"


@pytest.mark.parametrize("cause", ["host_hang", "frozen_process", "shape_mismatch"])
def test_a_program_that_hangs_is_ended_as_soon_as_its_verdict_is_known(job, cause):
    job.begin()
    job.stalls.step(0.5)
    assert job.ended == []
    job.explain(cause)
    job.stalls.step(1.0)
    assert job.ended == [True]


def test_ranks_that_progress_are_not_ended_later(job):
    job.begin()
    job.explain("straggler")
    job.stalls.step(1.0)
    job.stalls.note_progress()
    job.stalls.step(1000.0)
    assert job.ended == []
    assert job.stalls.deadline_s() == float("inf")


def test_a_stall_without_a_verdict_may_pass_until_a_late_one_says_otherwise(job):
    job.begin()
    assert job.stalls.deadline_s() == VERDICT_S
    job.stalls.step(VERDICT_S)
    job.stalls.step(VERDICT_S + 1)
    assert job.ended == []
    assert job.stalls.deadline_s() == VERDICT_S + 30.0
    job.explain("host_hang")
    job.stalls.step(VERDICT_S + 2)
    assert job.ended == [True]


def test_each_restart_in_vain_doubles_the_time_that_the_next_stall_has(job):
    job.explain("unknown")
    times = []
    for _ in range(8):
        job.begin()
        times.append(job.stalls.deadline_s())
        job.stalls.step(job.stalls.deadline_s())
    assert times == [30.0, 60.0, 120.0, 240.0, 480.0, 480.0, 480.0, 480.0]
    job.begin()
    job.stalls.note_progress()
    job.begin()
    assert job.stalls.deadline_s() == 30.0


def test_a_stall_beyond_those_that_are_kept_has_time_to_pass_too(job):
    job.stalls.on_examined(job.world, StallExamined(lasts=True), None, 0.0)
    job.stalls.step(29.9)
    assert job.ended == []
    job.stalls.step(30.0)
    assert job.ended == [True]


@pytest.mark.parametrize(
    "argv",
    [
        ("--on-stall", "stop"),
        ("--on-stall", "report"),
        (*_RESTART, "--restart-policy", "always"),
    ],
)
def test_without_the_smart_policy_nothing_waits(argv):
    job = _Job(*argv)
    job.begin()
    assert job.ended == [True]


def test_a_stall_that_cleared_while_it_was_examined_ends_nothing(job):
    job.begin(lasts=False)
    assert job.ended == [False]
