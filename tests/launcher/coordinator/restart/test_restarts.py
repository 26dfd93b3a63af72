"""Which attempts are followed by another one."""

from __future__ import annotations

import pytest

from echelon.launcher.coordinator.decide import EndAttempt, EndedBy
from echelon.launcher.coordinator.policy.failure import Failure
from echelon.launcher.coordinator.policy.policy import Action
from echelon.launcher.coordinator.restart.restarts import FREE_LOSSES, SHORT_S, Restarts

_FAILED = EndAttempt(EndedBy.WORKER, failed=True)
_LOSS = {"lost": True, "left": False, "num_nodes": 2, "low": 1}


def _next(restarts: Restarts, end: EndAttempt = _FAILED, **how: object) -> str | None:
    """Return what follows an attempt, in words; None if nothing does."""
    decision = restarts.next(end, explain=lambda: Failure(attempt=0), **how)
    if decision is None or decision.action is Action.STOP:
        return None
    return decision.reason or f"restart {restarts.num_used}"


def test_a_node_lost_again_and_again_just_after_the_start_uses_up_the_restarts():
    restarts = Restarts(2, is_elastic=True)
    said = [_next(restarts, lasted_s=1.0, **_LOSS) for _ in range(FREE_LOSSES + 3)]
    free = ["continuing with 2 nodes"] * FREE_LOSSES
    assert said == [*free, "restart 1", "restart 2", None]


def test_losses_far_apart_cost_nothing():
    restarts = Restarts(0, is_elastic=True)
    for _ in range(10 * FREE_LOSSES):
        assert _next(restarts, lasted_s=SHORT_S, **_LOSS) == "continuing with 2 nodes"
    assert restarts.num_used == 0


def test_a_world_that_ran_long_forgives_the_short_ones_before_it():
    restarts = Restarts(0, is_elastic=True)
    for _ in range(3):
        for _ in range(FREE_LOSSES):
            assert _next(restarts, lasted_s=1.0, **_LOSS)
        assert _next(restarts, lasted_s=SHORT_S, **_LOSS)


def test_a_node_that_leaves_is_free_and_a_failure_is_not():
    restarts = Restarts(1, is_elastic=True)
    leave = EndAttempt(EndedBy.LEAVE, failed=True)
    for _ in range(3 * FREE_LOSSES):
        said = _next(restarts, leave, lost=False, left=True, lasted_s=1.0, num_nodes=1, low=1)
        assert said == "continuing with 1 node"
    said = [
        _next(restarts, lost=False, left=False, lasted_s=1.0, num_nodes=1, low=1) for _ in range(2)
    ]
    assert said == ["restart 1", None]


@pytest.mark.parametrize(
    "end",
    [
        EndAttempt(EndedBy.WORKER, failed=False),
        EndAttempt(EndedBy.SIGNAL, failed=True),
        EndAttempt(EndedBy.STALL, failed=True),
    ],
    ids=["success", "signal", "stall"],
)
def test_nothing_follows_a_success_a_stop_or_a_stall_that_ends_the_job(end):
    assert _next(Restarts(9, is_elastic=True), end, lasted_s=1.0, **_LOSS) is None


def _decisions(restarts: Restarts, num: int, failure: Failure) -> list[tuple[Action, str]]:
    found = []
    for _ in range(num):
        made = restarts.next(
            _FAILED, lost=False, left=False, lasted_s=1.0, num_nodes=1, low=1,
            explain=lambda: failure,
        )  # fmt: skip
        assert made is not None
        found.append((made.action, made.reason))
    return found


_RAISED = Failure(attempt=0, cause="exception", site="ValueError at a.py:1 in f", said="it failed")


def test_the_policies_differ_in_what_follows_an_error_that_repeats():
    never = Restarts(3, is_elastic=False, policy="never")
    assert _decisions(never, 1, _RAISED) == [(Action.STOP, "--restart-policy never")]
    always = Restarts(3, is_elastic=False, policy="always")
    used_up = (Action.STOP, "all 3 restarts are used")
    assert _decisions(always, 4, _RAISED) == [*[(Action.RESTART, "")] * 3, used_up]
    smart = Restarts(3, is_elastic=False, policy="smart")
    first, (second, why) = _decisions(smart, 2, _RAISED)
    assert (first, second) == ((Action.RESTART, "it failed"), Action.STOP)
    assert "the same line raised the same error again" in why
    none = Restarts(0, is_elastic=False, policy="smart")
    assert _decisions(none, 1, _RAISED) == [(Action.STOP, "--max-restarts is 0")]
    assert not none.asks_for_verdict


def test_a_verdict_that_was_late_counts_for_the_next_decision():
    restarts = Restarts(9, is_elastic=False, policy="smart")
    late = Failure(attempt=0, cause="unknown", site="exited with code 1")
    assert _decisions(restarts, 1, late)[0][0] is Action.RESTART
    restarts.revise(0, _RAISED)
    assert _decisions(restarts, 1, _RAISED)[0][0] is Action.STOP


def test_a_stall_that_ends_an_attempt_is_a_failure_where_that_is_asked_for():
    stall = EndAttempt(EndedBy.STALL, failed=True)
    restarts = Restarts(9, is_elastic=False, policy="smart", after_stalls=True)
    assert restarts.is_failure(stall)
    assert not Restarts(9, is_elastic=False).is_failure(stall)
