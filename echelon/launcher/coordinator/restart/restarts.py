"""Decide whether another attempt follows, based on how the earlier attempts ended.

The policy (`policy/policy.py`) decides what follows a failure, within the limit set by
`--max-restarts`. The loss of a node does not count as a restart, because the next world might
succeed without that node. However, once several attempts in a row have lost a node soon after their
start, each further such loss does count, so that the job cannot restart indefinitely. The departure
of a node on request, a preemption, and a stop by the user are not failures.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from echelon.launcher.coordinator.decide import EndAttempt, EndedBy
from echelon.launcher.coordinator.policy.failure import Failure
from echelon.launcher.coordinator.policy.policy import MAX_REMEMBERED, Action, Decision, decide

SHORT_S = 60.0  # a world that loses a node sooner has hardly run
FREE_LOSSES = 3  # in a row; from then on each costs a restart


class Restarts:
    """The restart budget of one job.

    Args:
        max_restarts: the value of `--max-restarts`.
        is_elastic: whether the job can have more than one node.
        policy: the value of `--restart-policy`.
        exclude_after: the value of `--exclude-after`.
        after_stalls: whether a stall that ended an attempt counts as a failure.

    Attributes:
        num_used: how many restarts have been used.
        failures: the latest failures of the job, oldest first.
    """

    def __init__(
        self,
        max_restarts: int,
        *,
        is_elastic: bool,
        policy: str = "always",
        exclude_after: int = 0,
        after_stalls: bool = False,
    ) -> None:
        self._max = max_restarts
        self._is_elastic = is_elastic
        self._policy = policy
        self._exclude_after = exclude_after
        self._after_stalls = after_stalls
        self._num_short_losses = 0
        self.num_used = 0
        self.failures: list[Failure] = []

    @property
    def is_judged(self) -> bool:
        """True if restart decisions depend on verdicts, as under the `smart` policy."""
        return self._policy == "smart"

    @property
    def asks_for_verdict(self) -> bool:
        """True if the next decision needs a verdict: the policy is `smart`, and restarts remain."""
        return self._policy == "smart" and self.num_used < self._max

    def is_failure(self, end: EndAttempt) -> bool:
        """Return whether an attempt failed, rather than being stopped from outside the job."""
        by = end.ended_by
        return end.failed and (by is EndedBy.WORKER or (by is EndedBy.STALL and self._after_stalls))

    def revise(self, attempt: int, failure: Failure) -> None:
        """Replace the facts about an attempt's failure, now that its verdict has arrived."""
        self.failures = [failure if one.attempt == attempt else one for one in self.failures]

    def next(
        self,
        end: EndAttempt,
        *,
        lost: bool,
        left: bool,
        lasted_s: float,
        num_nodes: int,
        low: int,
        explain: Callable[[], Failure],
        others: Callable[[Sequence[str]], int] = lambda _: 0,
    ) -> Decision | None:
        """Decide what follows an attempt; return None if there is nothing to decide.

        Args:
            end: how the attempt ended.
            lost: whether nodes were lost in the attempt.
            left: whether nodes left the attempt because their launchers received a stop signal.
            lasted_s: how long the attempt ran, in seconds.
            num_nodes: how many nodes are connected now.
            low: the minimum number of nodes in a world.
            explain: returns the facts about the failure; called only if they are needed.
            others: returns how many nodes could take part without the given nodes.
        """
        is_leave = end.failed and end.ended_by is EndedBy.LEAVE
        if not (is_leave or self.is_failure(end)):
            return None
        if self._is_free(lost, left, lasted_s) and num_nodes >= low:
            nodes = "1 node" if num_nodes == 1 else f"{num_nodes} nodes"
            if lost:
                explain()  # for the report and the next attempt; it does not count as a failure
            return Decision(action=Action.CONTINUE, reason=f"continuing with {nodes}")
        over = self._why_over()
        if over:
            return Decision(action=Action.STOP, reason=over)
        failure = explain()
        decision = self._decide(failure, others, low)
        self.failures = [*self.failures, failure][-MAX_REMEMBERED:]
        if decision.action is Action.RESTART:
            self.num_used += 1
        return decision

    def _why_over(self) -> str:
        """Return why no further restart is allowed; "" if one is allowed."""
        if self._policy == "never":
            return "--restart-policy never"
        if self.num_used < self._max:
            return ""
        return f"all {self._max} restarts are used" if self._max else "--max-restarts is 0"

    def _decide(
        self, failure: Failure, others: Callable[[Sequence[str]], int], low: int
    ) -> Decision:
        if self._policy == "always":
            return Decision(action=Action.RESTART, reason="")
        return decide(
            failure,
            self.failures,
            exclude_after=self._exclude_after,
            can_replace=others(failure.nodes) >= low,
        )

    def _is_free(self, lost: bool, left: bool, lasted_s: float) -> bool:
        """Return whether a restart is free, i.e. does not count against `--max-restarts`.

        A restart of an elastic job is free if nodes were lost or have left. However, after
        `FREE_LOSSES` consecutive losses that each ended a world within `SHORT_S`, a restart after
        another such loss is not free.
        """
        if not self._is_elastic or not (lost or left):
            return False
        is_short = lost and lasted_s < SHORT_S
        self._num_short_losses = self._num_short_losses + 1 if is_short else 0
        return self._num_short_losses <= FREE_LOSSES
