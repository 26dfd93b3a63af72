"""Which failures are followed by another attempt, after which pause, on which nodes. Pure."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from echelon.analysis.finding import Cause
from echelon.launcher.coordinator.policy.failure import Failure
from echelon.launcher.coordinator.policy.policy import LONGEST_PAUSE_S, Action, Decision, decide
from echelon.launcher.coordinator.policy.table import TABLE, row_for, to_markdown

_DOCS = Path(__file__).parents[4] / "docs" / "restarts.md"


def _decide(failures: list[Failure], *, after: int = 2, can_replace: bool = True) -> Decision:
    *history, last = failures
    return decide(last, history, exclude_after=after, can_replace=can_replace)


def _actions(*failures: Failure) -> list[Action]:
    """Return what follows each of these failures of one job."""
    return [_decide(list(failures[: n + 1])).action for n in range(len(failures))]


def _raised(step: int = -1, site: str = "ValueError at train.py:88 in step") -> Failure:
    return Failure(attempt=0, cause="exception", is_certain=True, site=site, last_step=step)


def _killed(step: int = -1, node: str = "b") -> Failure:
    return Failure(
        attempt=0, cause="dead_process", is_certain=True, site="was killed by SIGKILL",
        culprit_ranks=(3,), nodes=(node,), hosts=(f"host-{node}",), is_killed=True, last_step=step,
    )  # fmt: skip


_RESTART, _STOP = Action.RESTART, Action.STOP
_MISMATCHES = [cause.value for cause in Cause if cause.value.endswith("_mismatch")]


@pytest.mark.parametrize("cause", [*_MISMATCHES, "skipped_collective", "order_desync"])
def test_ranks_that_differ_are_not_restarted(cause):
    sure = Failure(attempt=0, cause=cause, is_likely=True, said="rank 1 skipped all_reduce #7")
    assert _actions(sure) == [_STOP]
    assert "rank 1 skipped all_reduce #7" in _decide([sure]).reason
    guess = Failure(attempt=0, cause=cause)
    assert _actions(guess, guess) == [_RESTART, _STOP]


def test_an_error_at_the_same_line_twice_ends_the_job():
    assert _actions(_raised(57), _raised(57)) == [_RESTART, _STOP]
    assert _actions(_raised(), _raised()) == [_RESTART, _STOP]
    reason = _decide([_raised(57), _raised(57)]).reason
    assert "2 times without progress at step 57" in reason


def test_an_error_at_another_line_or_further_on_is_another_one():
    elsewhere = _raised(57, "ValueError at train.py:90 in step")
    assert _actions(_raised(57), elsewhere) == [_RESTART, _RESTART]
    assert _actions(_raised(57), _raised(190), _raised(300)) == [_RESTART] * 3


def test_an_error_that_comes_at_another_step_gets_one_attempt_more():
    assert _actions(_raised(57), _raised(53), _raised(53)) == [_RESTART, _RESTART, _STOP]


def test_other_failures_in_between_do_not_hide_a_repetition_and_steps_gained_do():
    assert _actions(_raised(57), _killed(51), _raised(57)) == [_RESTART, _RESTART, _STOP]
    assert _actions(_raised(57), _killed(80), _raised(81)) == [_RESTART] * 3


def test_an_error_of_the_network_or_of_storage_is_retried_with_pauses():
    failure = Failure(
        attempt=0, cause="exception", is_certain=True, is_outside=True,
        site="ConnectionResetError at data.py:9 in read", last_step=4,
    )  # fmt: skip
    failures = [failure] * 9
    assert set(_actions(*failures)) == {_RESTART}
    pauses = [_decide(failures[: n + 1]).pause_s for n in range(9)]
    assert pauses == [1, 2, 4, 8, 16, 32, LONGEST_PAUSE_S, LONGEST_PAUSE_S, LONGEST_PAUSE_S]


@pytest.mark.parametrize(
    ("owns", "expected"),
    [(True, [_STOP]), (False, [_RESTART, _STOP]), (None, [_RESTART, _STOP])],
)
def test_memory_is_tried_again_once_unless_the_job_itself_used_it_up(owns, expected):
    failure = Failure(attempt=0, cause="out_of_memory", owns_memory=owns, last_step=9)
    assert _actions(*[failure] * len(expected)) == expected


def test_a_death_by_a_signal_is_restarted_each_time_and_at_once_while_steps_are_gained():
    failures = [_killed(step) for step in range(10, 100, 10)]
    assert set(_actions(*failures)) == {_RESTART}
    assert {_decide(failures[: n + 1]).pause_s for n in range(9)} == {0.0}
    stuck = [_killed(10)] * 4
    assert [_decide(stuck[: n + 1]).pause_s for n in range(4)] == [0.0, 1.0, 2.0, 4.0]


def test_a_program_that_ends_itself_is_stopped_at_the_second_repetition():
    failure = Failure(attempt=0, cause="dead_process", is_certain=True, site="exited with code 3")
    assert _actions(failure, failure, failure) == [_RESTART, _RESTART, _STOP]


def test_a_node_is_excluded_after_its_own_failures_where_another_can_take_its_place():
    twice = [_killed(10), _killed(20)]
    assert _decide(twice[:1]).exclude == ()
    assert _decide(twice).exclude == ("b",)
    assert "2 failures of host-b: excluded" in _decide(twice).reason
    alone = _decide(twice, can_replace=False)
    assert alone.exclude == ()
    assert "no other node could take its place" in alone.reason
    assert _decide(twice, after=0).exclude == ()
    assert _decide([_killed(10), _killed(20, "c")]).exclude == ()


def test_a_node_is_not_excluded_for_the_programs_errors_or_by_a_guess():
    raised = Failure(attempt=0, cause="exception", is_certain=True, nodes=("b",), hosts=("b",))
    guess = Failure(attempt=0, cause="network", is_certain=False, nodes=("b",), hosts=("b",))
    sure = Failure(attempt=0, cause="network", is_certain=True, nodes=("b",), hosts=("b",))
    assert _decide([raised, guess, guess, guess, _killed()]).exclude == ()
    assert _decide([sure, sure]).exclude == ("b",)


def test_the_first_step_ever_made_is_progress_and_ends_the_pauses():
    never_began = [Failure(attempt=number, cause="unknown") for number in range(5)]
    assert _decide(never_began).pause_s == 8.0
    stalled = Failure(attempt=5, cause="storage_stall", last_step=384)
    assert _decide([*never_began, stalled]).pause_s == 1.0


def test_an_unknown_cause_is_restarted():
    assert set(_actions(*[Failure(attempt=0)] * 20)) == {_RESTART}


def test_every_cause_has_a_row_and_every_row_has_a_cause():
    causes = {cause.value for cause in Cause}
    assert {cause for row in TABLE for cause in row.causes} <= causes
    yes_or_no = (True, False)
    facts = itertools.product(causes, yes_or_no, yes_or_no, yes_or_no, yes_or_no)
    names = ("cause", "is_likely", "is_killed", "is_outside", "owns_memory")
    failures = [Failure(attempt=0, **dict(zip(names, one, strict=True))) for one in facts]
    reached = {row_for(one) for one in failures}
    assert reached == set(TABLE)


def test_the_table_in_the_docs_is_this_one():
    assert to_markdown() in _DOCS.read_text()
