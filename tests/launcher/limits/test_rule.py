"""When all nodes together require an early look."""

from __future__ import annotations

from dataclasses import replace

import pytest

from echelon.launcher.limits.rule import MAX_CLEARED, LimitRule, View

S = 1_000_000_000
NOW = 1000 * S
QUIET = View(seen_ns=NOW, worked_ns=NOW - 12 * S, num_moves=5, is_excused=False)
LATE = replace(QUIET, late_rank=3, late_since_ns=NOW - 11 * S, limit_s=10.0, what="train.py:9")


def test_a_look_names_the_rank_and_what_it_waits_in():
    look = LimitRule().look([QUIET, LATE], NOW)
    assert look is not None
    assert look.reason.startswith("rank 3 has waited for 11.0 s, longer than its history allows: ")
    assert look.reason.endswith("train.py:9")


@pytest.mark.parametrize(
    "other",
    [
        None,
        replace(QUIET, is_excused=True),
        replace(QUIET, worked_ns=NOW - 3 * S),
        replace(QUIET, seen_ns=NOW - 5 * S),
    ],
    ids=["has reported nothing", "is in a phase", "works", "was not heard of lately"],
)
def test_one_node_that_may_work_is_enough_for_none(other):
    assert LimitRule().look([other, LATE], NOW) is None


def test_a_node_of_thousands_may_report_more_rarely():
    rule = LimitRule(report_s=4.7)
    assert rule.look([replace(QUIET, seen_ns=NOW - 5 * S), LATE], NOW) is not None


def test_a_look_is_due_once_until_something_moves_and_false_ones_end_the_rule():
    rule = LimitRule()
    for cleared in range(MAX_CLEARED):
        moved = replace(LATE, num_moves=cleared)
        assert rule.look([moved], NOW) is not None
        assert rule.look([moved], NOW) is None
        assert rule.is_reported
        assert not rule.is_disarmed
        goes_on = replace(QUIET, num_moves=cleared + 1, worked_ns=NOW)
        assert rule.look([goes_on], NOW) is None
        assert not rule.is_reported
    assert rule.is_disarmed
    assert rule.look([LATE], NOW) is None


def test_what_was_reported_before_the_progress_of_another_node_raises_no_second_look():
    rule = LimitRule()
    assert rule.look([LATE, QUIET], NOW) is not None
    goes_on = replace(QUIET, num_moves=6, worked_ns=NOW)
    assert rule.look([LATE, goes_on], NOW) is None
    assert rule.num_cleared == 1


def test_a_job_of_1024_nodes_takes_one_view_per_node():
    views = [replace(QUIET, num_moves=n) for n in range(1023)]
    assert LimitRule().look([*views, LATE], NOW) is not None
    assert LimitRule().look([*views, replace(QUIET, worked_ns=NOW), LATE], NOW) is None


def test_after_a_loss_a_look_was_no_false_alarm_and_only_later_operations_are_judged():
    rule = LimitRule()
    assert rule.look([LATE], NOW) is not None
    rule.begin_again(NOW - 1 * S)
    assert not rule.is_reported
    assert rule.look([replace(LATE, num_moves=6)], NOW) is None
    assert rule.num_cleared == 0
    assert rule.look([replace(LATE, num_moves=6, late_since_ns=NOW - 1 * S)], NOW) is not None
