"""Which attempts are followed by another one."""

from __future__ import annotations

import pytest

from echelon.launcher.coordinator.decide import EndAttempt, EndedBy
from echelon.launcher.coordinator.policy.failure import Failure
from echelon.launcher.coordinator.policy.policy import Action
from echelon.launcher.coordinator.restarts import FREE_LOSSES, SHORT_S, Restarts

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
