"""Wrap echelon's `Work` objects as torch's, for `async_op=True` and for DDP.

[Note: errors and futures] The thread that waits for a `Work` completes its torch future. Torch
turns a Python exception into a wrong result in one case (`_create_work_from_future`) and into a
crash in another case (`Future.set_exception` under DDP). Therefore, `TorchWork.wait` raises errors
itself. `get_future` returns a child future, created by `then` with a callback that raises the
error. C++ code then receives a RuntimeError with the error's name and text.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch

from echelon.dist.torch_backend.futures import Job
from echelon.dist.torch_backend.tensors import Finish, both
from echelon.dist.work import Work

_core: Any = torch._C._distributed_c10d

CompleteLater = Callable[[Job], object]


class TorchWork(_core.Work):  # type: ignore[misc]  # torch's own class, untyped
    """One or more echelon operations, wrapped as one torch `Work`.

    Args:
        parts: the underlying `Work` objects; empty if the operation is already done.
        result: the tensors that the operation fills.
        finish: copies results from a buffer into the caller's tensors; runs once, on the first
            thread to observe that the operation has ended.
        complete_later: a function that passes a job to the thread that completes futures.
    """

    def __init__(
        self,
        parts: Sequence[Work],
        result: list[Any],
        finish: Finish | None,
        complete_later: CompleteLater,
    ) -> None:
        super().__init__()
        self._parts = parts
        self._tensors = result
        self._finish = finish
        self._complete_later = complete_later
        self._future: Any = None
        self._lock = threading.RLock()  # the future of a done operation is completed inside

    @property
    def parts(self) -> Sequence[Work]:
        """The underlying `Work` objects."""
        return self._parts

    def take_finish(self) -> Finish | None:
        """Return the function that copies the results into the program's tensors, or None.

        The caller must run this function, because later calls to `wait` do not.
        """
        with self._lock:
            finish, self._finish = self._finish, None
        return finish

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until the operation has ended or, on a device, is queued; return True.

        Raises:
            CollectiveTimeoutError: the operation did not end within `timeout`; it continues to run.
                (Without a `timeout`, the operation's own timeout bounds the wait.)
            CollectiveError: the operation itself failed.
        """
        limit_s = None if timeout is None else timeout.total_seconds()
        if limit_s is not None and limit_s <= 0:  # torch's 0 and -1 ms mean none
            limit_s = None
        for part in self._parts:
            part.wait(limit_s)
        if self._finish is not None:
            with self._lock:
                finish, self._finish = self._finish, None
                if finish is not None:
                    finish()
        return True

    def synchronize(self) -> None:
        """Wait for the operation; equivalent to `wait` without a timeout."""
        self.wait()

    def block_current_stream(self) -> None:
        """Make the current stream wait for the operation; on the host, block until it has ended."""
        self.wait()

    def is_completed(self) -> bool:
        """Return whether the operation has finished, successfully or not."""
        if not all(part.is_completed() for part in self._parts):
            return False
        if self.is_success():
            self.wait()  # a caller that polls reads the result without a wait
        return True

    def is_success(self) -> bool:
        """Return whether the operation has succeeded."""
        return all(part.is_completed() for part in self._parts) and self.exception() is None

    def exception(self) -> BaseException | None:
        """Return the operation's error, or None if the operation succeeded or has not ended."""
        errors = (part.exception() for part in self._parts)
        return next((error for error in errors if error is not None), None)

    def result(self) -> list[Any]:
        """Return the tensors that the operation fills."""
        return list(self._tensors)

    def source_rank(self) -> int:
        """Return the group rank that sent the received message."""
        return self._parts[0].source if self._parts else -1

    _source_rank = source_rank

    def get_future(self) -> Any:
        """Return a torch future for the tensors; see the note on errors in the module docstring."""
        with self._lock:
            if self._future is None:
                devices = sorted(
                    {t.device for t in self._tensors if t.device.type != "cpu"}, key=str
                )
                self._future = self._make_future(devices)
            return self._future

    def _make_future(self, devices: list[Any]) -> Any:
        started: Any = torch.futures.Future(devices=devices or None)

        def tensors(_: Any) -> list[Any]:
            self.wait()
            return self._tensors

        future = started.then(tensors)
        if devices or all(part.done for part in self._parts):
            started.set_result(None)  # on a device `wait` orders streams and does not block
        else:
            self._complete_later(lambda: self._complete(started))
        return future

    def _complete(self, started: Any) -> None:
        torch.set_grad_enabled(False)  # thread-local, and on where a thread starts
        for part in self._parts:
            part.pending.wait(None)
        started.set_result(None)


def joined(works: Sequence[TorchWork], complete_later: CompleteLater) -> TorchWork:
    """Combine several `TorchWork` objects into one."""
    parts = [part for work in works for part in work.parts]
    result = [tensor for work in works for tensor in work.result()]
    return TorchWork(parts, result, both([work.take_finish() for work in works]), complete_later)
