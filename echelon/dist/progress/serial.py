"""Run the collectives of a blocking engine one at a time, on one thread.

Every collective runs on this thread, even if the caller waits for the collective. Python signal
handlers run on the caller's thread, which is only waiting. They therefore never interrupt a
collective. Collectives that a handler calls are queued behind the current collective. Callers do
not need locks, because handlers can safely reenter the queue (`queue.SimpleQueue`).
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from queue import SimpleQueue

from echelon.dist.backends.interface import CHECK_EVERY_S, Watch
from echelon.dist.operation.operation import Operation
from echelon.dist.progress.outcome import Outcome

CarryOut = Callable[[Operation, Watch], None]


class Job(Outcome):
    """A queued collective; it serves as the `Pending` of its operation."""

    __slots__ = ("has_begun", "operation", "watch")

    def __init__(self, operation: Operation, watch: Watch) -> None:
        super().__init__()
        self.operation = operation
        self.watch = watch
        self.has_begun = False


class Serial:
    """A queue that runs one engine's collectives in the order in which they were called."""

    def __init__(self, name: str, carry_out: CarryOut) -> None:
        self._name = name
        self._carry_out = carry_out
        self._inbox: SimpleQueue[Job | None] = SimpleQueue()
        self._waiting: deque[Job] = deque()  # taken from the inbox by the thread, in order
        self._unfinished: deque[int] = deque()  # one item per job that has not ended
        self._thread: dict[str, threading.Thread] = {}  # empty, or the one
        self._is_closing = False

    @property
    def is_idle(self) -> bool:
        """True if no job is running or queued."""
        return not self._unfinished

    def submit(self, operation: Operation, watch: Watch) -> Job:
        """Queue a collective; never blocks."""
        job = Job(operation, watch)
        self._unfinished.append(1)
        self._inbox.put(job)
        if not self._thread:
            thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
            # setdefault decides atomically which of several callers starts its thread.
            if self._thread.setdefault("serial", thread) is thread:
                thread.start()
        return job

    def run(self, operation: Operation, watch: Watch) -> None:
        """Run a collective when its turn comes, and block until the collective has ended.

        Raises:
            Exception: the exception that the collective raised, or the error that ended its wait
                in the queue.
        """
        job = self.submit(operation, watch)
        while not job.wait(CHECK_EVERY_S):
            if not job.has_begun:  # else what carries it out checks, and knows which ranks are late
                watch.check()
        if job.error is not None:
            raise job.error

    def close(self, timeout_s: float) -> bool:
        """Stop the thread once all queued jobs have ended; return whether it ended in time."""
        self._is_closing = True
        self._inbox.put(None)
        thread = self._thread.get("serial")
        if thread is None or thread is threading.current_thread():
            return True
        if thread.ident is not None:
            thread.join(timeout_s)
        return not thread.is_alive()

    # ---- the thread ----

    def _serve(self) -> None:
        while not self._is_closing or self._waiting:
            self._take(block=not self._waiting)
            if self._waiting:
                self._run_one(self._waiting.popleft())

    def _take(self, *, block: bool) -> None:
        while block or not self._inbox.empty():
            job = self._inbox.get()
            block = False
            if job is not None:
                self._waiting.append(job)

    def _run_one(self, job: Job) -> None:
        job.has_begun = True
        error: BaseException | None = None
        try:
            job.watch.check()
            self._carry_out(job.operation, _Turn(job.watch, self._check_waiting))
        except BaseException as err:  # noqa: BLE001 -- it belongs to the one that waits for it
            error = err
        self._unfinished.pop()
        job.finish(error)

    def _check_waiting(self) -> None:
        """End queued jobs whose deadlines passed while another job was running."""
        self._take(block=False)
        now = time.monotonic()
        for job in [one for one in self._waiting if now >= one.watch.deadline_s]:
            try:
                job.watch.check()
            except Exception as err:  # noqa: BLE001 -- it belongs to the one that waits for it
                self._waiting.remove(job)
                self._unfinished.pop()
                job.finish(err)


class _Turn:
    """A `Watch` that checks the running job's limits and the deadlines of queued jobs."""

    def __init__(self, watch: Watch, check_waiting: Callable[[], None]) -> None:
        self._watch = watch
        self._check_waiting = check_waiting
        self.deadline_s = watch.deadline_s

    def check(self, needed: Callable[[], Sequence[int]] | None = None) -> None:
        self._watch.check(needed)
        self._check_waiting()
