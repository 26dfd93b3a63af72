"""Ranks of the C core in one process: engines over one mapping, each for a thread of the test."""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from echelon.dist.backends.shm import native
from echelon.dist.operation.operation import OPERATIONS

_SLOT_BYTES = 32 << 10
_RING_BYTES = 4096
_FLOAT32 = 11
_PATIENCE_S = 60.0


class Ranks:
    """The engines of one group. `ranks[r]` is rank r's, opened at first use."""

    def __init__(self, size: int) -> None:
        core = native.core()
        if core is None:
            pytest.skip("the C core was not built")
        self.size = size
        self.memory = mmap.mmap(-1, core.segment_bytes(size, _SLOT_BYTES, _RING_BYTES))
        self._core = core
        self._engines: dict[int, Any] = {}

    def __getitem__(self, rank: int) -> Any:
        if rank not in self._engines:
            peers = [(0, -1, 0)] * self.size
            self._engines[rank] = self._core.Engine(
                self.memory, 0, rank, self.size, _SLOT_BYTES, _RING_BYTES, False, peers
            )
        return self._engines[rank]

    def close(self) -> None:
        for engine in self._engines.values():
            engine.close()


def all_reduce(x: np.ndarray, sequence: int, timeout_s: float = _PATIENCE_S) -> tuple[Any, ...]:
    """Return the arguments of a sum."""
    call = b"sum" + bytes([sequence])
    return (0, sequence, _FLOAT32, 0, 0, 0, x, x, None, call, timeout_s)


def barrier(sequence: int, timeout_s: float = _PATIENCE_S) -> tuple[Any, ...]:
    """Return the arguments of a barrier."""
    kind = OPERATIONS.index("barrier")
    return (kind, sequence, 0, 0, 0, 0, None, None, None, b"barrier", timeout_s)


def send(
    x: np.ndarray, to: int, tag: int = 0, timeout_s: float = _PATIENCE_S, dtype: int = _FLOAT32
) -> tuple[Any, ...]:
    """Return the arguments of a send."""
    return (OPERATIONS.index("send"), 0, dtype, 0, to, tag, x, None, None, b"", timeout_s)


def recv(
    x: np.ndarray, source: int, tag: int = 0, timeout_s: float = _PATIENCE_S, dtype: int = _FLOAT32
) -> tuple[Any, ...]:
    """Return the arguments of a receive; source -1: any."""
    return (OPERATIONS.index("recv"), 0, dtype, 0, source, tag, None, x, None, b"", timeout_s)


def wait_until(condition: Callable[[], bool]) -> None:
    """Poll until something is so."""
    deadline = time.monotonic() + _PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.001)


class Thread(threading.Thread):
    """A rank beside the test's own thread; `join` raises what it raised."""

    def __init__(self, body: Callable[[], None]) -> None:
        super().__init__(daemon=True)
        self._body = body
        self._raised: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self._body()
        except BaseException as err:  # noqa: BLE001 -- raised again by join
            self._raised = err

    def join(self, timeout: float | None = _PATIENCE_S) -> None:
        super().join(timeout)
        assert not self.is_alive(), "a rank hangs"
        if self._raised is not None:
            raise self._raised
