"""Complete a copy of a rank's state on a thread, while the rank computes its next step.

Most of a copy is the optimizer's state, which only the optimizer writes, at the end of a step. The
thread reads that state during the forward and backward passes. `ShardedState` waits for the thread
before the optimizer writes, and before the step ends.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

from echelon.dist.resilient.copies.memory import Stamp
from echelon.errors import CollectiveError

NAME = "echelon-copies"  # of the thread


class Copying:
    """A copy whose first part has been written.

    Args:
        step: the step whose start is copied.
        complete: writes the rest, and stamps the copy unless its source has changed since;
            returns the stamp.
        exchange: exchanges copies with other places; called with that stamp.

    Attributes:
        step: the step whose start is copied.
    """

    def __init__(
        self, step: int, complete: Callable[[], Stamp], exchange: Callable[[Stamp], None]
    ) -> None:
        self.step = step
        self._complete = complete
        self._exchange = exchange
        self._pid = os.getpid()
        self._error: BaseException | None = None
        self._has_copied = threading.Event()
        self._thread = threading.Thread(target=self._run, name=NAME, daemon=True)

    @property
    def is_here(self) -> bool:
        """True unless this process is a forked child, which does not have its parent's thread."""
        return os.getpid() == self._pid

    def start(self) -> None:
        """Complete the copy on a thread."""
        self._thread.start()

    def run(self) -> None:
        """Complete the copy on the calling thread.

        Raises:
            CollectiveError: a partner was lost.
        """
        try:
            stamp = self._complete()
        finally:
            self._has_copied.set()
        self._exchange(stamp)

    def _run(self) -> None:
        try:
            self.run()
        except BaseException as err:  # noqa: BLE001 -- raised by `wait`, on the thread that trains
            self._error = err

    def wait_until_copied(self, timeout_s: float) -> None:
        """Wait until the thread no longer reads this rank's state. Does not raise its error.

        Raises:
            CollectiveError: the thread still reads it after `timeout_s`.
        """
        if not self._has_copied.wait(timeout_s):
            raise self._late(timeout_s)

    def wait(self, timeout_s: float) -> None:
        """Wait until the thread has ended, and raise the error that ended it.

        Raises:
            CollectiveError: the thread has not ended after `timeout_s`, or a partner was lost.
            OSError: the host has no memory left.
        """
        self.wait_until_ended(timeout_s)
        if self._error is not None:
            raise self._error

    def wait_until_ended(self, timeout_s: float) -> None:
        """Wait until the thread has ended; do not raise its error.

        Raises:
            CollectiveError: the thread has not ended after `timeout_s`.
        """
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise self._late(timeout_s)

    def _late(self, timeout_s: float) -> CollectiveError:
        return CollectiveError(
            f"the copy of step {self.step} of this rank's state is not complete after "
            f"{timeout_s:g} s"
        )
