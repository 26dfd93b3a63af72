"""Provide the gloo backend: collectives and messages over TCP, with PyTorch's build of Gloo.

    all_reduce of float32/64, int32/64     Gloo's own ring, except for rank-ordered sums and for min
                                           and max of floats (which can lose a NaN)
    other sums                             all_to_all of shards, summed locally in rank order with
                                           float32 accumulation, then all_gather: 2 n bytes per rank
    reduce_scatter                         all_to_all of shards, summed locally: n bytes per rank
                                           (Gloo's version performs a full all_reduce)
    reduce                                 reduce_scatter, then gather
    two ranks: all_reduce, reduce_scatter, all_gather     swaps, see `Transport.swap`

Before every collective the ranks exchange their calls, so a mismatch raises an error that names the
ranks. The exchange also carries up to 256 bytes of data (`inline.py`), and doubles as the barrier.
Messages have their own connections (`sockets.py`).
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import secrets
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from echelon.dist.arithmetic import inline
from echelon.dist.arithmetic.reduce import reduce
from echelon.dist.backends.gloo.sockets import SECRET_BYTES, Sockets
from echelon.dist.backends.host_engine import HostEngine
from echelon.dist.backends.interface import ConnectionBroken, Members, Watch
from echelon.dist.errors import build
from echelon.dist.errors.mismatch import mismatch_error, split_error
from echelon.dist.membership.address import own_address
from echelon.dist.membership.meet import exchange
from echelon.dist.operation.arrays import Flat, is_floating
from echelon.dist.operation.operation import Operation
from echelon.dist.progress.aside import make_aside
from echelon.errors import CollectiveError
from echelon.store import PrefixStore
from echelon.store.deadline import time_left_s

_OWN_SUMS = frozenset({"float32", "float64", "int32", "int64"})
_OWN_OPS = frozenset({"sum", "min", "max", "prod"})
# Gloo's own words, in its TCP transport and its waits.
_CONNECTION = re.compile(
    r"connection|closed by peer|reset by peer|broken pipe|timed? ?out|pair closure|"
    r"socket|remote end|read error|write error",
    re.IGNORECASE,
)


def not_ready() -> str:
    """Return the reason this machine cannot run the backend, or "" if it can."""
    if importlib.util.find_spec("torch") is None:
        return "needs torch, whose build of Gloo it uses: pip install '.[torch]'"
    return ""


def create(members: Members, store: PrefixStore, timeout_s: float) -> GlooEngine:
    """Create the engine for a group; every member must call this.

    Raises:
        CollectiveTimeoutError: some members did not join within `timeout_s` seconds.
    """
    return GlooEngine(members, store, timeout_s)


class GlooEngine(HostEngine):
    """An engine over TCP that uses Gloo for collectives and its own connections for messages."""

    name = "gloo"

    def __init__(
        self, members: Members, store: PrefixStore, timeout_s: float, *, is_step: bool = False
    ) -> None:
        """Connect the members.

        Args:
            is_step: whether this engine only carries out steps of another engine's collectives. If
                so, it neither compares calls nor transfers messages.

        Raises:
            CollectiveTimeoutError: some members did not join within `timeout_s` seconds.
            CollectiveError: this host cannot be reached at its own address.
        """
        super().__init__(members)
        self._compares = not is_step
        self._ordered = members.options.reduction == "rank_ordered"
        self._is_closed = False
        self._transport: Any = None
        self._sockets: Sockets | None = None
        if self._others:
            deadline_s = time.monotonic() + timeout_s
            address = members.address or own_address(store.endpoint)
            with contextlib.ExitStack() as made:
                if not is_step:
                    self._sockets = _meet(members, store, address, deadline_s)
                    made.callback(self._sockets.close)
                    self.carry_messages(self._sockets)
                self._transport = _connect(members, store, address, deadline_s)
                made.pop_all()
            _engines.add(self)
        self._run: dict[str, Callable[[Operation, Watch], None]] = {
            "all_reduce": self._all_reduce,
            "reduce": self._reduce,
            "all_gather": self._all_gather,
            "reduce_scatter": self._reduce_scatter,
            "broadcast": self._broadcast,
            "all_to_all": self._all_to_all,
            "gather": self._gather,
            "scatter": self._scatter,
            "barrier": lambda operation, watch: None,  # noqa: ARG005
        }

    def carry_out(self, operation: Operation, watch: Watch) -> None:
        """Run the next collective on the calling thread; block until it is done."""
        with _telling_apart():
            rows = self._compare_calls(operation, watch)
            if rows is not None and inline.is_small(operation):
                inline.finish(operation, rows, self._rank)
            else:
                self._run[operation.kind](operation, watch)

    def cut(self, reason: CollectiveError | None) -> None:
        """Break the connections at both ends if the group has failed or is busy.

        If the group is idle, `close` shuts down the connections gracefully instead.
        """
        if self._transport is not None and not (reason is None and self._serial.is_idle):
            self._transport.break_off()
        super().cut(reason)

    def close(self) -> None:
        """Close the connections and stop the threads."""
        if self._is_closed:
            return
        self._is_closed = True
        if not self.close_threads() and self._transport is not None:
            self._transport.keep()
        if self._transport is not None:
            self._transport.close()

    def close_in_child(self) -> None:
        """Drop a forked child's copies of the connections, without destroying Gloo's objects."""
        if self._transport is not None:
            self._transport.keep()
        if self._sockets is not None:
            self._sockets.close_in_child()

    # ---- steps of another engine ----

    def start_all_gather(self, out: Flat, data: Flat) -> Any:
        """Start an all_gather of bytes; `finish` waits for it."""
        return self._transport.all_gather(out, data)

    def start_swap(self, out: Flat, data: Flat, deadline_s: float) -> Any:
        """Start an exchange of `data` with the only other member; see `Transport.swap`."""
        return self._transport.swap(out, data, time_left_s(deadline_s))

    def finish(self, watch: Watch, work: Any) -> None:
        """Wait for an operation started by `start_all_gather` or `start_swap`."""
        with _telling_apart():
            self._wait(watch, work)

    def _wait(self, watch: Watch, work: Any) -> None:
        from echelon.dist.backends.gloo.transport import wait

        wait(work, watch)

    def _compare_calls(self, operation: Operation, watch: Watch) -> Flat | None:
        """Compare and return all ranks' calls; return None if no comparison is needed."""
        if self._size == 1 or not self._compares:
            return None
        mine = inline.pack(operation)
        rows = np.empty((self._size, len(mine)), np.uint8)
        self._wait(watch, self._transport.all_gather(rows.reshape(-1), mine))
        if not inline.are_equal(rows, mine):
            raise mismatch_error(self._members, operation, inline.calls(rows))
        return rows

    # ---- sums ----

    def _all_reduce(self, operation: Operation, watch: Watch) -> None:
        data = _array(operation.target)
        if self._size == 1 or not len(data):
            self._alone(operation)
            return
        if self._size == 2:
            self._all_reduce_of_two(operation, watch, data)
            return
        own = operation.dtype in _OWN_SUMS and operation.reduce_op in _OWN_OPS
        if is_floating(operation.dtype) and operation.reduce_op in ("min", "max"):
            own = False  # Gloo's comparison drops a NaN that is not rank 0's
        if own and not self._ordered:
            work = self._transport.all_reduce(data, operation.reduce_op)
            self._wait(watch, work)
            return
        shares = self._summed_share(operation, watch, data)
        whole = np.empty((self._size, len(shares)), data.dtype)
        work = self._transport.all_gather(whole.reshape(-1), shares)
        self._wait(watch, work)
        np.copyto(data, whole.reshape(-1)[: len(data)])

    def _all_reduce_of_two(self, operation: Operation, watch: Watch, data: Flat) -> None:
        """Reduce one half of the data on each of two ranks, and swap the results.

        Small arrays are not split; instead, both ranks reduce the whole array.
        """
        middle = (len(data) + 1) // 2
        halves = [data[:middle], data[middle:]]
        if data.nbytes <= self._transport.small_bytes:
            halves[self._rank] = halves[1 - self._rank] = data
        mine, other = halves[self._rank], halves[1 - self._rank]
        theirs = np.empty_like(mine)
        self._swap(watch, theirs, other)
        parts = [mine, theirs] if self._rank == 0 else [theirs, mine]
        reduce(mine, parts, operation.reduce_op, operation.dtype)
        if mine is not data:
            self._swap(watch, other, mine)

    def _reduce(self, operation: Operation, watch: Watch) -> None:
        source = _array(operation.source)
        if self._size == 1 or not len(source):
            self._alone(operation)
            return
        share = self._summed_share(operation, watch, source)
        whole = np.empty((self._size, len(share)), source.dtype)
        rows = list(whole) if operation.target is not None else None
        self._wait(watch, self._transport.gather(rows, share, operation.root))
        if operation.target is not None:
            np.copyto(operation.target, whole.reshape(-1)[: len(source)])

    def _summed_share(self, operation: Operation, watch: Watch, source: Flat) -> Flat:
        """Sum all ranks' data and return this rank's shard. All shards have the same length."""
        length = -(-len(source) // self._size)
        padded = source
        if length * self._size != len(source):
            padded = np.zeros(length * self._size, source.dtype)
            padded[: len(source)] = source
        share = np.empty(length, source.dtype)
        self._sum_rows(operation, watch, padded, share)
        return share

    def _reduce_scatter(self, operation: Operation, watch: Watch) -> None:
        source, target = _array(operation.source), _array(operation.target)
        if self._size == 1 or not (len(target) or operation.input_splits):
            self._alone(operation)
        elif operation.input_splits:
            self._sum_uneven_rows(operation, watch, source, target)
        else:
            self._sum_rows(operation, watch, source, target)

    def _sum_uneven_rows(
        self, operation: Operation, watch: Watch, source: Flat, target: Flat
    ) -> None:
        parts = np.empty((self._size, len(target)), source.dtype)
        outs = [target.nbytes] * self._size
        ins = [count * source.itemsize for count in operation.input_splits]
        work = self._transport.all_to_all(parts.reshape(-1), source, outs, ins)
        self._wait(watch, work)
        if len(target):
            reduce(target, list(parts), operation.reduce_op, operation.dtype)

    def _sum_rows(self, operation: Operation, watch: Watch, source: Flat, target: Flat) -> None:
        rows = list(source.reshape(self._size, len(target)))
        if self._size == 2:
            other = 1 - self._rank
            theirs = np.empty(len(target), source.dtype)
            self._swap(watch, theirs, rows[other])
            rows[other] = theirs
        else:
            parts = np.empty((self._size, len(target)), source.dtype)
            splits = [target.nbytes] * self._size
            work = self._transport.all_to_all(parts.reshape(-1), source, splits, splits)
            self._wait(watch, work)
            rows = list(parts)
        reduce(target, rows, operation.reduce_op, operation.dtype)

    def _swap(self, watch: Watch, out: Flat, data: Flat) -> None:
        self._wait(watch, self.start_swap(out, data, watch.deadline_s))

    def _alone(self, operation: Operation) -> None:
        if operation.source is not None and operation.target is not None:
            reduce(operation.target, [operation.source], operation.reduce_op, operation.dtype)

    # ---- movement ----

    def _all_gather(self, operation: Operation, watch: Watch) -> None:
        source, target = _array(operation.source), _array(operation.target)
        if self._size == 1 or not (len(source) or operation.output_splits):
            np.copyto(target, source)
            return
        if operation.output_splits:  # Gloo has none: the same bytes, each rank's sent to each
            outs = [count * source.itemsize for count in operation.output_splits]
            copies, ins = np.tile(source, self._size), [source.nbytes] * self._size
            work = self._transport.all_to_all(target, copies, outs, ins)
            self._wait(watch, work)
        elif self._size == 2:
            rows = target.reshape(2, len(source))
            self._swap(watch, rows[1 - self._rank], source)
            np.copyto(rows[self._rank], source)
        else:
            self._wait(watch, self._transport.all_gather(target, source))

    def _broadcast(self, operation: Operation, watch: Watch) -> None:
        is_root = self._rank == operation.root
        data = _array(operation.source if is_root else operation.target)
        if self._size > 1 and len(data):
            self._wait(watch, self._transport.broadcast(data, operation.root))

    def _all_to_all(self, operation: Operation, watch: Watch) -> None:
        source, target = _array(operation.source), _array(operation.target)
        if self._size == 1:
            np.copyto(target, source)
            return
        self._agree_on_splits(operation, watch)
        ins = [count * source.itemsize for count in operation.input_splits]
        outs = [count * target.itemsize for count in operation.output_splits]
        self._wait(watch, self._transport.all_to_all(target, source, outs, ins))

    def _agree_on_splits(self, operation: Operation, watch: Watch) -> None:
        mine = np.array([*operation.input_splits, *operation.output_splits], np.int64)
        tables = np.empty((self._size, len(mine)), np.int64)
        self._wait(watch, self._transport.all_gather(tables.reshape(-1), mine))
        sent, wanted = tables[:, : self._size], tables[:, self._size :].T
        if (sent != wanted).any():
            pairs = np.argwhere(sent != wanted)
            raise split_error(self._members, operation, sorted(set(pairs.reshape(-1).tolist())))

    def _gather(self, operation: Operation, watch: Watch) -> None:
        source, target = _array(operation.source), operation.target
        if self._size == 1 or not len(source):
            if target is not None:
                np.copyto(target, source)
            return
        rows = None if target is None else list(target.reshape(self._size, len(source)))
        self._wait(watch, self._transport.gather(rows, source, operation.root))

    def _scatter(self, operation: Operation, watch: Watch) -> None:
        source, target = operation.source, _array(operation.target)
        if self._size == 1 or not len(target):
            if source is not None:
                np.copyto(target, source)
            return
        rows = None if source is None else list(source.reshape(self._size, len(target)))
        self._wait(watch, self._transport.scatter(target, rows, operation.root))


def _array(data: Flat | None) -> Flat:
    assert data is not None
    return data


def _meet(members: Members, store: PrefixStore, address: str, deadline_s: float) -> Sockets:
    """Listen for message connections, and exchange addresses with the other members."""
    try:
        sockets = Sockets(members.rank, address)
    except OSError as err:
        raise CollectiveError(
            f"group {members.name!r} was not set up, because this rank cannot listen on {address}, "
            f"the address from which its host reaches the store: {err}",
            group=members.name,
            operation="init",
            ranks=[members.ranks[members.rank]],
        ) from err
    try:
        mine = {"at": sockets.address, "secret": secrets.token_hex(SECRET_BYTES)}
        facts = exchange(members, store, "messages", mine, deadline_s)
        addresses = [(str(fact["at"][0]), int(fact["at"][1])) for fact in facts]
        sockets.introduce(addresses, bytes.fromhex(facts[0]["secret"]))
    except BaseException:
        sockets.close()
        raise
    return sockets


def _connect(members: Members, store: PrefixStore, address: str, deadline_s: float) -> Any:
    from echelon.dist.backends.gloo.transport import Transport

    left_s = time_left_s(deadline_s)
    try:
        # Gloo waits in C, also for a peer that has published its address and died.
        return make_aside(
            lambda: Transport(store, members, address, left_s), Transport.keep, members.check
        )
    except RuntimeError as err:
        raise build.connection_broken(members, Operation("init", 0, timeout_s=left_s), err) from err


@contextlib.contextmanager
def _telling_apart() -> Iterator[None]:
    """Raise Gloo's errors about broken connections as `ConnectionBroken`, and others unchanged."""
    try:
        yield
    except RuntimeError as err:
        text = " ".join(str(err).split())
        if not _CONNECTION.search(text):
            raise
        raise ConnectionBroken(text) from err


_engines: weakref.WeakSet[GlooEngine] = weakref.WeakSet()


def _close_in_child() -> None:
    for engine in list(_engines):
        engine.close_in_child()


os.register_at_fork(after_in_child=_close_in_child)
