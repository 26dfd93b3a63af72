"""Complete a copy of a rank's state on a background thread, while the rank computes its next step.

Most of a copy is the optimizer's state, to which only the optimizer writes, at the end of a step.
The thread reads that state during the forward and backward passes. `CopiedState` waits for the
thread before the optimizer writes, and before the step ends.

The background thread stamps a copy only after the training thread has decided that the source is
unchanged. torch increments a tensor's version only after a write, so a write in progress would go
unnoticed. The training thread therefore makes this decision between two of its operations.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

from echelon.dist.resilient.copies.memory import Stamp
from echelon.errors import CollectiveError

NAME = "echelon-copies"  # of the thread
# A thread waits as long as this rank and its partners are within the step, however long that is.
# The end of the step has a shorter deadline, and the end of the group ends an exchange.
_STEP_S = 1e6


class Copying:
    """A copy in progress, whose first section has been written.

    Args:
        step: the step at whose start the state is copied.
        complete: writes the rest of the copy; returns the copy's stamp.
        commit: stamps the copy, unless its second argument (is_void) is True; returns the stamp to
            send to the partner ranks.
        exchange: exchanges copies with the partner ranks, given the stamp from `commit` and a
            timeout in seconds. A timeout of None means the group's timeout.

    Attributes:
        step: the step at whose start the state is copied.
    """

    def __init__(
        self,
        step: int,
        complete: Callable[[], Stamp],
        commit: Callable[[Stamp, bool], Stamp],
        exchange: Callable[[Stamp, float | None], None],
    ) -> None:
        self.step = step
        self._complete = complete
        self._commit = commit
        self._exchange = exchange
        self._pid = os.getpid()
        self._error: BaseException | None = None
        self._stamp: Stamp | None = None
        self._is_void = False
        self._has_copied = threading.Event()
        self._is_decided = threading.Event()
        self._has_stamped = threading.Event()
        self._thread = threading.Thread(target=self._run, name=NAME, daemon=True)

    @property
    def is_here(self) -> bool:
        """True unless this process is a forked child, which does not have its parent's thread."""
        return os.getpid() == self._pid

    @property
    def needs_decision(self) -> bool:
        """True if the copying thread has read this rank's state and awaits a call to `decide`."""
        return self._has_copied.is_set() and not self._is_decided.is_set()

    def start(self) -> bool:
        """Complete the copy on a background thread. The caller must then call `decide`.

        If no thread can be started, the copy is completed on the calling thread, and `wait`
        exchanges it with the partner ranks.

        Returns:
            True if a thread was started.
        """
        try:
            self._thread.start()
        except RuntimeError:
            self.copy()
            return False
        return True

    def copy(self) -> None:
        """Complete and stamp the copy on the calling thread, but leave the exchange to `run`."""
        is_on_thread = threading.current_thread() is self._thread
        if not is_on_thread:
            self.decide(is_void=False)
        try:
            stamp = self._complete()
            self._has_copied.set()
            if not self._is_decided.wait(_STEP_S):
                raise self._late(_STEP_S)
            self._stamp = self._commit(stamp, self._is_void)
        finally:
            self._has_copied.set()
            self._has_stamped.set()

    def run(self) -> None:
        """Complete the copy on the calling thread, and exchange it with the partner ranks.

        Raises:
            CollectiveError: a partner rank was lost.
        """
        if self._stamp is None:
            self.copy()
        assert self._stamp is not None
        is_on_thread = threading.current_thread() is self._thread
        self._exchange(self._stamp, _STEP_S if is_on_thread else None)

    def _run(self) -> None:
        try:
            self.run()
        except BaseException as err:  # noqa: BLE001 -- raised by `wait`, on the thread that trains
            self._error = err

    def decide(self, *, is_void: bool) -> None:
        """Tell the background thread whether to stamp the copy. Only the first call has an effect.

        Args:
            is_void: True if the source has changed. The source must not change during this call.
        """
        if not self._is_decided.is_set():
            self._is_void = is_void
            self._is_decided.set()

    def wait_until_copied(self, timeout_s: float) -> None:
        """Wait until the copying thread has finished reading this rank's state.

        An error of this thread is ignored.

        Raises:
            CollectiveError: the thread is still reading the state after `timeout_s` seconds.
        """
        if not self._has_copied.wait(timeout_s):
            raise self._late(timeout_s)

    def wait_until_stamped(self, timeout_s: float) -> None:
        """Wait until the copying thread has stamped or discarded the copy.

        An error that occurred in that thread is ignored.

        Raises:
            CollectiveError: the thread has done neither after `timeout_s` seconds.
        """
        if not self._has_stamped.wait(timeout_s):
            raise self._late(timeout_s)

    def wait(self, timeout_s: float) -> None:
        """Wait until the thread has ended, and raise its error if it failed.

        If no thread was started, complete and exchange the copy on the calling thread.

        Raises:
            CollectiveError: the thread has not ended after `timeout_s` seconds, or a partner rank
                was lost.
            OSError: the host has no memory left for the copies.
        """
        if self._thread.ident is None:
            self.run()
            return
        self.wait_until_ended(timeout_s)
        if self._error is not None:
            raise self._error

    def wait_until_ended(self, timeout_s: float) -> None:
        """Wait until the copying thread has ended; ignore any error raised in the thread.

        Raises:
            CollectiveError: the thread has not ended after `timeout_s` seconds.
        """
        if self._thread.ident is None:
            return
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise self._late(timeout_s)

    def _late(self, timeout_s: float) -> CollectiveError:
        return CollectiveError(
            f"the copy of step {self.step} of this rank's state is not complete after "
            f"{timeout_s:g} s"
        )
