"""Choose the steps at which all ranks save checkpoints, by step count or by elapsed time."""

from __future__ import annotations

import time
from collections.abc import Callable

from echelon.dist import runtime
from echelon.dist.agreement.agreement import Agreement
from echelon.dist.checkpoint.ranks.peers import Peers, World, find


class SaveSchedule:
    """A schedule of saves, which are due at the same steps on all ranks.

    Time is measured on rank 0's clock, from the last step at which a checkpoint was due. If
    `every_s` is set and the ranks communicate through torch.distributed, each call to `due`
    performs a small all_gather.

    Args:
        every_steps: the number of steps between checkpoints, counted from step 0.
        every_s: the number of seconds between checkpoints.
        now: a function that returns the time in seconds; only rank 0's time is used.

    Raises:
        ValueError: neither interval is given, or an interval is not positive.

    Example:
        >>> schedule = SaveSchedule(every_steps=100)
        >>> [step for step in range(1, 301) if schedule.due(step)]
        [100, 200, 300]
    """

    def __init__(
        self,
        *,
        every_steps: int | None = None,
        every_s: float | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        if every_steps is None and every_s is None:
            raise ValueError("a schedule needs every_steps or every_s")
        for name, value in (("every_steps", every_steps), ("every_s", every_s)):
            if value is not None and not value > 0:
                raise ValueError(f"{name} must be above 0, got {value}")
        self._every_steps = every_steps
        self._every_s = every_s
        self._now = now
        self._since_s = now()
        self._peers: Peers | None = None
        self._agreement: Agreement | None = None

    def due(self, step: int) -> bool:
        """Return whether a checkpoint is due after this step.

        Every rank must call this method once per step.

        Args:
            step: the number of finished steps.

        Raises:
            ValueError: the job has several ranks, but `init` was not called.
            CollectiveTimeoutError, PeerLostError, StoreError: the ranks could not agree.
        """
        by_time = self._every_s is not None and self._agreed(self._now() - self._since_s)
        by_steps = self._every_steps is not None and step > 0 and step % self._every_steps == 0
        if by_time or by_steps:
            self._since_s = self._now()
        return by_time or by_steps

    def _agreed(self, passed_s: float) -> bool:
        """Return whether enough time has passed on rank 0 for a save to be due. Collective."""
        assert self._every_s is not None
        if self._agreement is not None and self._agreement.is_closed:  # ranks are lost
            if runtime.is_between_worlds():
                return False  # as on the ranks that have asked already
            self._peers = None
        if self._peers is None:
            self._peers = find(to_write=True)
            if isinstance(self._peers, World):
                self._agreement = runtime.agree_on_calls("saving")
        is_time = passed_s >= self._every_s and self._peers.rank == 0
        if self._agreement is None:
            return bool(self._peers.all_gather(is_time)[0])
        if is_time:
            self._agreement.ask(f"{passed_s:.0f} s since the last")
        return self._agreement.reached()
