"""Run torch's ProcessGroupGloo on echelon's store.

This module is imported only where Gloo is used, because it imports torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Callable
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch
import torch.distributed as torch_dist

from echelon.dist.backends.interface import Members, Watch
from echelon.dist.operation.arrays import Flat
from echelon.store import PrefixStore

_SLICE_S = 0.1
_SLICE = timedelta(seconds=_SLICE_S)
_CLOSE_S = 1.0
_NEVER_SENT = (1 << 31) - 1  # a tag under which no rank sends
_SWAPPED = (1 << 31) - 2  # the tag of `swap`; both are above the users'
_NO_LIMIT = timedelta(days=365)
_core: Any = torch._C._distributed_c10d
_REDUCE_OPS = {
    "sum": torch_dist.ReduceOp.SUM,
    "min": torch_dist.ReduceOp.MIN,
    "max": torch_dist.ReduceOp.MAX,
    "prod": torch_dist.ReduceOp.PRODUCT,
}


class _Bridge(_core.Store):  # type: ignore[misc]  # torch's own class, untyped
    """An adapter that lets Gloo set up its full mesh through echelon's store."""

    def __init__(self, store: PrefixStore, timeout_s: float, check: Callable[[], None]) -> None:
        super().__init__()
        self._store = store
        self._timeout_s = timeout_s
        self._check = check

    def set(self, key: str, value: Any) -> None:
        self._store.set(key, value.encode("latin-1") if isinstance(value, str) else bytes(value))

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._store.get(key, timeout=self._timeout_s)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        limit = self._timeout_s if timeout is None else timeout
        self._store.wait(keys, timeout=limit, check=self._check)

    def add(self, key: str, amount: int) -> int:
        return self._store.add(key, amount)

    def check(self, keys: list[str]) -> bool:
        return self._store.check(keys)


class Swap:
    """A receive and a send in progress, with the interface of a Gloo collective.

    A separate thread waits for Gloo, and the caller waits for that thread. While waiting, the
    caller can therefore check whether the operation must be aborted (see `Watch`).
    """

    def __init__(self, wait_for_both: Callable[[], None]) -> None:
        self._wait_for_both = wait_for_both
        self._error: BaseException | None = None
        self._finished = threading.Event()

    def run(self) -> None:
        """Wait for both the receive and the send. Runs on the `_Swapper` thread."""
        try:
            self._wait_for_both()
        except BaseException as err:  # noqa: BLE001 -- it belongs to the one that waits
            self._error = err
        del self._wait_for_both
        self._finished.set()

    def is_completed(self) -> bool:
        """Return whether the swap has ended, successfully or not."""
        return self._finished.is_set()

    def wait(self, timeout: timedelta | None = None) -> None:
        """Block until the swap has ended.

        Raises:
            RuntimeError: a connection broke, or the timeout expired.
        """
        if not self._finished.wait(None if timeout is None else timeout.total_seconds()):
            raise RuntimeError("the exchange did not complete before the timeout")
        if self._error is not None:
            raise self._error


class _Swapper:
    """The thread that waits for swaps. The first swap starts the thread."""

    def __init__(self) -> None:
        self._swaps: SimpleQueue[Swap | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, swap: Swap) -> Swap:
        """Queue a swap behind earlier swaps."""
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._serve, name="echelon-gloo-swaps", daemon=True
            )
            self._thread.start()
        self._swaps.put(swap)
        return swap

    def close(self, timeout_s: float) -> None:
        """Stop the thread once all submitted swaps have ended; wait at most `timeout_s` seconds."""
        self._swaps.put(None)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    def _serve(self) -> None:
        while (swap := self._swaps.get()) is not None:
            swap.run()
            del swap  # an idle thread keeps no arrays


class Transport:
    """A full mesh of Gloo connections."""

    small_bytes = 64 << 10  # up to this a swap is one of Gloo's collectives

    def __init__(
        self, store: PrefixStore, members: Members, address: str, timeout_s: float
    ) -> None:
        options = _core.ProcessGroupGloo._Options()
        options._devices = [_core.ProcessGroupGloo.create_device(hostname=address)]
        options._timeout = timedelta(seconds=timeout_s)
        options._threads = 2
        self._store = _Bridge(store, timeout_s, members.check)  # Gloo keeps no reference of its own
        rank, size = members.rank, members.size
        self._made: Any = _core.ProcessGroupGloo(self._store, rank, size, options)
        self._made.set_timeout(_NO_LIMIT)  # each operation has its own, which its caller holds
        self._peer = (rank + 1) % size
        self._swapper = _Swapper()

    @property
    def _group(self) -> Any:
        made = self._made
        if made is None:
            raise RuntimeError("the connections are already closed")
        return made

    def close(self) -> None:
        """Release the connections. Return within 2 s, even if Gloo's destructor is still waiting.

        The destructor waits for operations that were started and then abandoned. If a peer's host
        is frozen, these operations never end, and the destructor keeps waiting on its own thread.
        """
        held, self._made = [self._made], None
        destroyer = threading.Thread(target=held.clear, name="echelon-gloo-close", daemon=True)
        try:
            destroyer.start()
        except RuntimeError:  # the system has no thread left
            held.clear()
        else:
            destroyer.join(_CLOSE_S)
        self._swapper.close(_CLOSE_S)

    def break_off(self) -> None:
        """Close the connections at both ends, even while operations are waiting on them.

        Gloo has no function for this purpose, but a receive that times out closes all connections.
        The Gloo object is never destroyed afterwards, because its destructor might block
        indefinitely.
        """
        made = self._made
        self.keep()
        if made is not None:
            nothing = torch.empty(1, dtype=torch.uint8)
            with contextlib.suppress(RuntimeError):
                made.recv([nothing], self._peer, _NEVER_SENT).wait(timedelta(milliseconds=1))

    def keep(self) -> None:
        """Keep Gloo's object alive, because its destructor could block forever."""
        made, self._made = self._made, None
        if made is not None:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(made))

    def all_gather(self, out: Flat, data: Flat) -> Any:
        """Start an all_gather of bytes."""
        return self._group._allgather_base(tensor(out), tensor(data))

    def all_reduce(self, data: Flat, reduce_op: str) -> Any:
        """Start Gloo's own ring all_reduce, for the dtypes and reductions that it supports."""
        options = _core.AllreduceOptions()
        options.reduceOp = _REDUCE_OPS[reduce_op]
        return self._group.allreduce([torch.from_numpy(data)], options)

    def all_to_all(self, out: Flat, data: Flat, outs: list[int], ins: list[int]) -> Any:
        """Start an all_to_all of bytes.

        Args:
            out: the buffer for the received data, in rank order.
            data: the data to send, in rank order.
            outs: the number of bytes to receive from each rank.
            ins: the number of bytes to send to each rank.
        """
        return self._group.alltoall_base(
            tensor(out), tensor(data), outs, ins, _core.AllToAllOptions()
        )

    def swap(self, out: Flat, data: Flat, timeout_s: float) -> Any:
        """Start exchanging bytes with the only other member, whose buffers must match in size.

        The receive is posted before the send, so that data flows in both directions at once. With
        Gloo's all_to_all, which sends first, half of the exchanges took twice as long on a 60 MB/s
        link.
        """
        if max(out.nbytes, data.nbytes) <= self.small_bytes:
            sizes = [[0, 0], [0, 0]]
            for one, array in zip(sizes, (out, data), strict=True):
                one[self._peer] = array.nbytes
            return self.all_to_all(out, data, *sizes)
        coming = self.receive(out, self._peer, _SWAPPED)
        going = self.send(data, self._peer, _SWAPPED)
        limit = timedelta(seconds=timeout_s + _SLICE_S)  # who waits in slices decides before that
        works = [(coming, out), (going, data)]  # with the arrays, which Gloo does not keep

        def wait_for_both() -> None:
            for work, _ in works:
                work.wait(limit)

        return self._swapper.submit(Swap(wait_for_both))

    def broadcast(self, data: Flat, root: int) -> Any:
        """Start a broadcast of the root's bytes."""
        options = _core.BroadcastOptions()
        options.rootRank, options.rootTensor = root, 0
        return self._group.broadcast([tensor(data)], options)

    def gather(self, rows: list[Flat] | None, data: Flat, root: int) -> Any:
        """Start gathering bytes from all ranks at the root."""
        options = _core.GatherOptions()
        options.rootRank = root
        outs = [] if rows is None else [[tensor(row) for row in rows]]
        return self._group.gather(outs, [tensor(data)], options)

    def scatter(self, out: Flat, rows: list[Flat] | None, root: int) -> Any:
        """Start a scatter of the root's bytes."""
        options = _core.ScatterOptions()
        options.rootRank = root
        ins = [] if rows is None else [[tensor(row) for row in rows]]
        return self._group.scatter([tensor(out)], ins, options)

    def send(self, data: Flat, peer: int, tag: int) -> Any:
        """Start sending bytes to one rank."""
        return self._group.send([tensor(data)], peer, tag)

    def receive(self, data: Flat, peer: int, tag: int) -> Any:
        """Start receiving bytes from one rank."""
        return self._group.recv([tensor(data)], peer, tag)


def tensor(data: Flat) -> Any:
    """View an array as a tensor of bytes. The array can be read-only."""
    raw = data.view(np.uint8)
    if not raw.flags.writeable and raw.size:
        window: Any = (ctypes.c_uint8 * raw.size).from_address(raw.ctypes.data)
        raw = np.frombuffer(window, np.uint8)
    return torch.from_numpy(raw)


def wait(work: Any, watch: Watch) -> None:
    """Wait for a collective; check every 100 ms whether `watch` requires that it be aborted.

    Raises:
        RuntimeError: Gloo reported an error.
        CollectiveError: the operation was aborted by `watch`.
    """
    while True:
        try:
            if work.is_completed():
                work.wait()
                return
            work.wait(_SLICE)
        except RuntimeError:
            if work.is_completed():
                work.wait()  # raises what it ended with; nothing if it ended just after the slice
                return
            watch.check()
        else:
            return
