"""The benchmark's campaign: the planned faults, and what counts as wasted or wrong. Pure."""

from __future__ import annotations

from dataclasses import asdict
from itertools import pairwise
from typing import Any

import pytest

from benchmarks.campaign.jobs import WITH_STANDBYS
from benchmarks.campaign.plan import KINDS, STEP_S, plan_of
from benchmarks.campaign.table import bars, is_late, is_wrong_stop, table, useful, wasted


@pytest.mark.parametrize("held_back", [False, True])
def test_plans_are_the_same_each_time_and_use_their_own_half_of_the_kinds(held_back):
    plans = [plan_of(seed, held_back=held_back) for seed in range(400)]
    assert plans == [plan_of(seed, held_back=held_back) for seed in range(400)]
    used = {fault.kind for plan in plans for fault in plan.faults}
    assert used == {kind for kind, one in KINDS.items() if one.held_back == held_back}
    for plan in plans:
        steps = [0, *(fault.step for fault in plan.faults), plan.num_steps]
        assert all(one < other for one, other in pairwise(steps)), plan
        taken = sum(KINDS[fault.kind].takes_node for fault in plan.faults)
        assert taken <= plan.num_nodes - 2, "no spare node takes its place"
        assert not any(KINDS[fault.kind].stays for fault in plan.faults[:-1])


def _record(*kinds: str, attempts: int, finished: bool = True) -> dict[str, Any]:
    return {
        "launcher": "echelon",
        "plan": {"num_nodes": 2, "faults": [{"kind": kind} for kind in kinds]},
        "faults": [{"kind": kind, "recovered_s": 3.0, **asdict(KINDS[kind])} for kind in kinds],
        "num_attempts": attempts,
        "finished": finished,
        "exit_code": 0 if finished else 1,
        "num_done": 200,
        "wall_s": 400 * STEP_S,
        "phases": [[0.5, 1.5, 4.0]] * (attempts - 1),
    }


@pytest.mark.parametrize(
    ("kinds", "attempts", "expected"),
    [
        (("kill", "hang"), 3, 0),
        (("kill", "hang"), 5, 2),
        (("cut",), 1, 0),
        (("cut",), 2, 1),
        (("bad_node",), 3, 0),
        (("kill", "exception_always"), 3, 0),  # the second restart shows that it stays
        (("kill", "exception_always"), 13, 10),
        ((), 0, 0),  # it never began
    ],
)
def test_restarts_beyond_what_the_faults_need_are_wasted(kinds, attempts, expected):
    assert wasted(_record(*kinds, attempts=attempts)) == expected


def test_a_restart_that_came_to_no_step_is_one_too():
    record = _record("kill", attempts=2)
    actions = ["continue", "restart", "restart", "stop"]
    record["report"] = {"decisions": [{"action": action} for action in actions]}
    assert wasted(record) == 2


def test_a_stop_is_wrong_where_no_fault_stays():
    assert is_wrong_stop(_record("kill", attempts=1, finished=False))
    assert not is_wrong_stop(_record("kill", attempts=2))
    late = {**_record("kill", attempts=1, finished=False), "exit_code": -9}
    assert is_late(late)
    assert not is_wrong_stop(late)
    assert not is_wrong_stop(_record("exception_always", attempts=2, finished=False))


def test_the_table_has_a_column_for_each_launcher():
    ours = [_record(attempts=1), _record("kill", attempts=2)]
    theirs = [{**one, "launcher": "torchrun"} for one in ours]
    assert useful(ours[0]) == 0.5
    shown = table([*ours, *theirs]).splitlines()
    assert shown[0] == "| | echelon | torchrun |"
    assert "| of the fault-free jobs' | 100.0 % | 100.0 % |" in shown
    assert "| until its first step | 4.0 s | 4.0 s |" in shown
    assert "| `kill` | 3.0 s, 3.0 s (1) | 3.0 s, 3.0 s (1) |" in shown


@pytest.mark.parametrize(
    ("begins_s", "told", "expected"),
    [
        ([0, 12, 32], 2, 0),
        ([0, 12, 14, 32], 3, 1),  # the first fault was answered twice
        ([0, 12, 14], 2, 1),  # and the second one not at all: this makes up for nothing
        ([0, 5, 12, 32], 3, 1),  # before any fault
        ([0, 12, 32], 4, 2),  # two attempts were ended before they began
    ],
)
def test_a_restart_belongs_to_the_fault_before_it(begins_s, told, expected):
    record = _record("kill", "hang", attempts=len(begins_s))
    record["begins_s"] = begins_s
    for fault, at_s in zip(record["faults"], (10, 30), strict=True):
        fault["at_s"] = at_s
    record["report"] = {"decisions": [{"action": "restart"}] * told}
    assert wasted(record) == expected


def test_the_bars_say_what_is_met():
    ours = [_record("kill", attempts=2), _record(attempts=1)]
    peer = {**_record("kill", attempts=2), "launcher": "torchrun", "num_done": 100}
    lines = bars([*ours, peer]).splitlines()
    assert lines == [
        "faults: 1 (bar >= 200): not met",
        "wrong stops and jobs not finished in time: 0 (bar <= 0): met",
        "wasted restarts, %: 0 (bar <= 3): met",
        "useful time, % of the fault-free jobs': 100 (bar >= 90): met",
        "useful time, times torchrun's: 2 (bar >= 1.3): met",
    ]
    assert "not met" in bars([_record("kill", attempts=4)]).splitlines()[2]
    assert bars([]).splitlines()[0] == "faults: 0 (bar >= 200): not met"


def test_the_bars_are_those_of_echelon_with_standbys_where_it_was_run():
    plain = _record("kill", attempts=3)
    kept_ready = {**_record("kill", attempts=2), "launcher": WITH_STANDBYS}
    assert "wasted restarts, %: 50" in bars([plain])
    assert "wasted restarts, %: 0" in bars([plain, kept_ready])
