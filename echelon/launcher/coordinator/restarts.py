"""Whether a failed attempt is followed by another: pure, over the ends of attempts.

A lost node changes the world and costs no restart, since a replacement or a smaller world may do
better; but a node that is lost again and again just after the start (a pod that runs out of memory
whenever the model is built) would restart the world indefinitely. So after a few such losses in a
row each of them costs a restart, as a failure does.
"""

from __future__ import annotations

from echelon.launcher.coordinator.decide import EndAttempt, EndedBy

SHORT_S = 60.0  # a world that lost a node sooner has hardly run
FREE_LOSSES = 3  # in a row; from then on each costs a restart


class Restarts:
    """The restarts of one job.

    Args:
        max_restarts: `--max-restarts`.
        is_elastic: whether the job may have more than one node.

    Attributes:
        num_used: how many of them have been spent.
    """

    def __init__(self, max_restarts: int, *, is_elastic: bool) -> None:
        self._max = max_restarts
        self._is_elastic = is_elastic
        self._num_short_losses = 0
        self.num_used = 0

    def next(
        self, end: EndAttempt, *, lost: bool, left: bool, lasted_s: float, num_nodes: int, low: int
    ) -> str | None:
        """Return what to print about the next attempt; None: there is none.

        Args:
            lost: nodes were lost in the attempt that ended.
            left: nodes left it on purpose.
            lasted_s: how long it ran.
            num_nodes: nodes that are connected now.
            low: nodes that a world needs.
        """
        if not end.failed or end.ended_by not in (EndedBy.WORKER, EndedBy.LEAVE):
            return None
        if self._is_free(lost, left, lasted_s) and num_nodes >= low:
            return f"continuing with {'1 node' if num_nodes == 1 else f'{num_nodes} nodes'}"
        if self.num_used >= self._max:
            return None
        self.num_used += 1
        return f"restart {self.num_used} of {self._max}"

    def _is_free(self, lost: bool, left: bool, lasted_s: float) -> bool:
        """Whether nodes were lost or left, and not again and again just after the start."""
        if not self._is_elastic or not (lost or left):
            return False
        is_short = lost and lasted_s < SHORT_S
        self._num_short_losses = self._num_short_losses + 1 if is_short else 0
        return self._num_short_losses <= FREE_LOSSES
