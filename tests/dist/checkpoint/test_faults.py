"""Kills, full disks and hanging disks at every call of a save: nothing committed is ever lost."""

from __future__ import annotations

import dataclasses
import itertools
import os
import random
import signal
import tempfile
from pathlib import Path

import pytest

pytest.importorskip("torch")

from tests.dist.checkpoint.faults import KINDS, Case, audit, num_moments, run_cases
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.ranks
NEVER = 1 << 30


@pytest.fixture
def memory():
    """A folder in memory: flushing a disk takes longer than all else here."""
    place = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=place) as folder:
        yield Path(folder)


def every_kind():
    return [
        Case(kind, victim, background, layout, NEVER)
        for kind, victim, background, layout in itertools.product(
            KINDS, (0, 1), (False, True), ("replicas", "parts")
        )
    ]


def at_every_call(folder, kinds):
    """Count the calls of each kind of save by running it without a fault; return all cases."""
    folder.mkdir()
    codes = run_ranks(run_cases, 2, str(folder), kinds, timeout_s=600.0)
    assert codes == [[0] * len(kinds)] * 2
    cases = []
    for number, case in enumerate(kinds):
        assert not audit(case, folder / str(number))
        moments = range(num_moments(folder / str(number), case.victim))
        cases += [dataclasses.replace(case, moment=moment) for moment in moments]
    return cases


def campaign(folder, cases):
    """Run the cases, check each; return how many met their fault."""
    folder.mkdir()
    ends = run_ranks(run_cases, 2, str(folder), cases, timeout_s=3600.0)
    num_fired = 0
    for number, case in enumerate(cases):
        fired = audit(case, folder / str(number))
        num_fired += fired
        expected = -signal.SIGKILL if fired and case.kind == "kill" else 0
        assert ends[case.victim][number] == expected, (case, ends[case.victim][number])
        assert ends[1 - case.victim][number] == 0, (case, ends[1 - case.victim][number])
    return num_fired


def test_a_fault_anywhere_in_a_save_damages_and_loses_nothing(memory):
    """A sample, another one each time; the test below tries them all."""
    seed = random.randrange(1 << 30)
    print("seed", seed)  # shown if it fails
    clock = random.Random(seed)
    kinds = [clock.choice([kind for kind in every_kind() if kind.kind == name]) for name in KINDS]
    cases = clock.sample(at_every_call(memory / "plain", kinds), 10)
    assert campaign(memory / "faulty", cases) >= 7


@pytest.mark.slow
def test_a_fault_at_every_call_of_a_save_damages_and_loses_nothing(memory):
    cases = at_every_call(memory / "plain", every_kind())
    assert len(cases) >= 500
    num_fired = campaign(memory / "faulty", cases)
    print(f"{num_fired} of {len(cases)} faults were met")
    assert num_fired >= 500
