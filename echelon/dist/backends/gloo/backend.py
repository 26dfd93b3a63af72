"""The gloo backend: Gloo's exchanges, with what it lacks built from what it does well.

    all_reduce of float32/64, int32/64     Gloo's own ring (unless rank-ordered sums are asked for;
                                           not min and max of floats: they may lose a NaN)
    other sums                             all_to_all of shares, summed here in rank order with
                                           float32 accumulation, then all_gather: 2 n bytes a rank
    reduce_scatter                         all_to_all of parts, summed here: n bytes a rank
                                           (Gloo's own is a whole all_reduce)
    reduce                                 reduce_scatter, then gather
    two ranks: all_reduce, reduce_scatter, all_gather     swaps, see `Transport.swap`

Before every collective the ranks exchange what they called, so that a mismatch is an error with
names. That exchange is the barrier, too, and carries data of up to 256 bytes (`small.py`). When a
connection breaks, each rank closes its own, so that everybody wakes, and those that are left meet
once more at the store: who does not come is the one to name.
"""

from __future__ import annotations

import contextlib
import importlib.util
import struct
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import numpy as np

from echelon.dist.arithmetic import inline
from echelon.dist.arithmetic.reduce import reduce
from echelon.dist.backends.interface import Members
from echelon.dist.errors import build
from echelon.dist.errors.mismatch import message_error, mismatch_error, split_error
from echelon.dist.membership.environment import Rendezvous
from echelon.dist.membership.survivors import Survivors
from echelon.dist.operation.arrays import Flat, is_floating
from echelon.dist.operation.operation import Operation
from echelon.dist.progress.executor import LaneBackend
from echelon.errors import CollectiveError
from echelon.store import PrefixStore

_OWN_SUMS = frozenset({"float32", "float64", "int32", "int64"})
_OWN_OPS = frozenset({"sum", "min", "max", "prod"})
_MESSAGE = struct.Struct("<16sQ")


def not_ready() -> str:
    """Say why this machine cannot run the backend; "" if it can."""
    if importlib.util.find_spec("torch") is None:
        return "needs torch, whose build of Gloo it uses: pip install '.[torch]'"
    return ""


def create(members: Members, store: PrefixStore, timeout_s: float) -> GlooBackend:
    """Make the engine of a group; every member calls this.

    Raises:
        CollectiveTimeoutError: members did not come within `timeout_s`.
    """
    return GlooBackend(members, store, timeout_s)


class GlooBackend(LaneBackend):
    """Carries out operations over TCP."""

    name = "gloo"

    def __init__(
        self,
        members: Members,
        store: PrefixStore,
        timeout_s: float,
        *,
        verdicts: PrefixStore | None = None,
        compares: bool = True,
    ) -> None:
        """Connect the members.

        Args:
            verdicts: where ranks leave whom they blame; groups that fail together share it.
            compares: whether the ranks exchange what they call; False where the caller has.
        """
        super().__init__()
        self._compares = compares
        self._members = members
        self._rank = members.rank
        self._size = members.size
        self._store = store
        self._ordered = members.options.reduction == "rank_ordered"
        self._lost: CollectiveError | None = None
        self._lost_lock = threading.Lock()
        self._aborted = False
        self._closed = False
        deadline_s = time.monotonic() + timeout_s
        self.survivors = Survivors(members, store, verdicts or store, deadline_s)
        self._transport: Any = None if self._size == 1 else self._connect(deadline_s)
        self._run: dict[str, Callable[[Operation, float], None]] = {
            "all_reduce": self._all_reduce,
            "reduce": self._reduce,
            "all_gather": self._all_gather,
            "reduce_scatter": self._reduce_scatter,
            "broadcast": self._broadcast,
            "all_to_all": self._all_to_all,
            "gather": self._gather,
            "scatter": self._scatter,
            "barrier": lambda operation, deadline_s: None,  # noqa: ARG005
        }

    def execute(self, operation: Operation) -> None:
        """Carry out one operation; a message of the main thread on its lane's.

        Gloo waits for messages in C, where no signal's handler would run.
        """
        if operation.is_message and threading.current_thread() is threading.main_thread():
            self.execute_on_lane(operation)
        else:
            super().execute(operation)

    def abort(self) -> None:
        """End the group on this rank: what waits here and at the others raises."""
        self._aborted = True
        self.survivors.give_up()
        if self._transport is not None:
            self._transport.break_off()

    def close(self) -> None:
        """Close the connections and forget the peers."""
        if self._closed:
            return
        self._closed = True
        if not self.is_idle():
            self.abort()
        self._aborted = True
        self.survivors.leave()
        self.close_lanes()
        if self._transport is not None:
            self._transport.close()
        self.survivors.close()

    def _connect(self, deadline_s: float) -> Any:
        from echelon.dist.backends.gloo.transport import Transport, address_towards

        where = Rendezvous.from_environment()
        address = address_towards(where.master_addr, where.master_port)
        left_s = max(0.001, deadline_s - time.monotonic())
        try:
            return Transport(self._store, self._rank, self._size, address, left_s)
        except RuntimeError as err:
            raise build.peer_lost(
                self._members, Operation("init", 0, timeout_s=left_s), []
            ) from err

    # ---- the way of an operation ----

    def _carry_out(self, operation: Operation) -> None:
        if self._lost is not None:
            raise build.broken_since(self._members, operation, self._lost)
        deadline_s = time.monotonic() + operation.timeout_s
        with self._failing(operation, deadline_s):
            if operation.is_message:
                self._message(operation, deadline_s)
            else:
                rows = self._compare_calls(operation, deadline_s)
                if rows is not None and inline.is_small(operation):
                    inline.finish(operation, rows, self._rank)
                else:
                    self._run[operation.kind](operation, deadline_s)

    def start_all_gather(self, out: Flat, data: Flat) -> Any:
        """Start collecting bytes of all; `finish` waits for them. All members must come to it."""
        return self._transport.all_gather(out, data)

    def start_swap(self, out: Flat, data: Flat, deadline_s: float) -> Any:
        """Start to swap `data` with the only other member; both know both sizes."""
        return self._transport.swap(out, data, max(0.001, deadline_s - time.monotonic()))

    def finish(self, operation: Operation, deadline_s: float, work: Any) -> None:
        """Wait for what was started, in place of `operation`."""
        with self._failing(operation, deadline_s):
            self._wait(operation, deadline_s, work)

    @contextlib.contextmanager
    def _failing(self, operation: Operation, deadline_s: float) -> Iterator[None]:
        """Turn what goes wrong into our errors, and tell the others."""
        try:
            yield
        except CollectiveError as err:
            self._give_up(err)
            raise
        except RuntimeError as err:
            found = self._find_lost(operation, deadline_s)
            raise found from err
        except BaseException:  # a signal's handler raised: the others must not wait for us
            self.abort()
            raise

    def _wait(self, operation: Operation, deadline_s: float, work: Any) -> None:
        from echelon.dist.backends.gloo.transport import wait

        if not wait(work, deadline_s, lambda: self._look_around(operation)):
            raise self._find_lost(operation, deadline_s)

    def _look_around(self, operation: Operation) -> None:
        if self._lost is not None:
            raise build.broken_since(self._members, operation, self._lost)
        if self._aborted:
            raise build.aborted(self._members, operation)
        self.survivors.look(operation)

    def _find_lost(self, operation: Operation, deadline_s: float) -> CollectiveError:
        """Say who is gone, once for the group: every lane comes here when the connections break."""
        with self._lost_lock:
            if self._lost is not None:
                return build.broken_since(self._members, operation, self._lost)
            if self._aborted:
                return build.aborted(self._members, operation)
            if self._transport is not None:
                self._transport.break_off()
            self._lost = self.survivors.find(operation, time.monotonic() >= deadline_s)
            self.survivors.tell(self._lost)
            return self._lost

    def _give_up(self, error: CollectiveError) -> None:
        with self._lost_lock:
            if self._lost is not None:
                return
            self._lost = error
        self.survivors.tell(error)
        if self._transport is not None:
            self._transport.break_off()

    def _compare_calls(self, operation: Operation, deadline_s: float) -> Flat | None:
        """Return everybody's call, with data if that is small; None where nothing is compared."""
        if self._size == 1 or not self._compares:
            return None
        mine = inline.pack(operation)
        rows = np.empty((self._size, len(mine)), np.uint8)
        self._wait(operation, deadline_s, self._transport.all_gather(rows.reshape(-1), mine))
        if not inline.are_equal(rows, mine):
            raise mismatch_error(self._members, operation, inline.calls(rows))
        return rows

    # ---- sums ----

    def _all_reduce(self, operation: Operation, deadline_s: float) -> None:
        data = _array(operation.target)
        if self._size == 1 or not len(data):
            self._alone(operation)
            return
        if self._size == 2:
            self._all_reduce_of_two(operation, deadline_s, data)
            return
        own = operation.dtype in _OWN_SUMS and operation.reduce_op in _OWN_OPS
        if is_floating(operation.dtype) and operation.reduce_op in ("min", "max"):
            own = False  # Gloo's comparison drops a NaN that is not rank 0's
        if own and not self._ordered:
            work = self._transport.all_reduce(data, operation.reduce_op)
            self._wait(operation, deadline_s, work)
            return
        shares = self._summed_share(operation, deadline_s, data)
        whole = np.empty((self._size, len(shares)), data.dtype)
        work = self._transport.all_gather(whole.reshape(-1), shares)
        self._wait(operation, deadline_s, work)
        np.copyto(data, whole.reshape(-1)[: len(data)])

    def _all_reduce_of_two(self, operation: Operation, deadline_s: float, data: Flat) -> None:
        """Swap halves and sum one, then swap the sums; what is small is swapped at once."""
        middle = (len(data) + 1) // 2
        halves = [data[:middle], data[middle:]]
        if data.nbytes <= self._transport.small_bytes:
            halves[self._rank] = halves[1 - self._rank] = data
        mine, other = halves[self._rank], halves[1 - self._rank]
        theirs = np.empty_like(mine)
        self._swap(operation, deadline_s, theirs, other)
        parts = [mine, theirs] if self._rank == 0 else [theirs, mine]
        reduce(mine, parts, operation.reduce_op, operation.dtype)
        if mine is not data:
            self._swap(operation, deadline_s, other, mine)

    def _reduce(self, operation: Operation, deadline_s: float) -> None:
        source = _array(operation.source)
        if self._size == 1 or not len(source):
            self._alone(operation)
            return
        share = self._summed_share(operation, deadline_s, source)
        whole = np.empty((self._size, len(share)), source.dtype)
        rows = list(whole) if operation.target is not None else None
        self._wait(operation, deadline_s, self._transport.gather(rows, share, operation.root))
        if operation.target is not None:
            np.copyto(operation.target, whole.reshape(-1)[: len(source)])

    def _summed_share(self, operation: Operation, deadline_s: float, source: Flat) -> Flat:
        """Sum my 1/size of everybody's data, padded so that all shares are equal."""
        length = -(-len(source) // self._size)
        padded = source
        if length * self._size != len(source):
            padded = np.zeros(length * self._size, source.dtype)
            padded[: len(source)] = source
        share = np.empty(length, source.dtype)
        self._sum_rows(operation, deadline_s, padded, share)
        return share

    def _reduce_scatter(self, operation: Operation, deadline_s: float) -> None:
        source, target = _array(operation.source), _array(operation.target)
        if self._size == 1 or not (len(target) or operation.input_splits):
            self._alone(operation)
        elif operation.input_splits:
            self._sum_uneven_rows(operation, deadline_s, source, target)
        else:
            self._sum_rows(operation, deadline_s, source, target)

    def _sum_uneven_rows(
        self, operation: Operation, deadline_s: float, source: Flat, target: Flat
    ) -> None:
        parts = np.empty((self._size, len(target)), source.dtype)
        outs = [target.nbytes] * self._size
        ins = [count * source.itemsize for count in operation.input_splits]
        work = self._transport.all_to_all(parts.reshape(-1), source, outs, ins)
        self._wait(operation, deadline_s, work)
        if len(target):
            reduce(target, list(parts), operation.reduce_op, operation.dtype)

    def _sum_rows(
        self, operation: Operation, deadline_s: float, source: Flat, target: Flat
    ) -> None:
        rows = list(source.reshape(self._size, len(target)))
        if self._size == 2:
            other = 1 - self._rank
            theirs = np.empty(len(target), source.dtype)
            self._swap(operation, deadline_s, theirs, rows[other])
            rows[other] = theirs
        else:
            parts = np.empty((self._size, len(target)), source.dtype)
            splits = [target.nbytes] * self._size
            work = self._transport.all_to_all(parts.reshape(-1), source, splits, splits)
            self._wait(operation, deadline_s, work)
            rows = list(parts)
        reduce(target, rows, operation.reduce_op, operation.dtype)

    def _swap(self, operation: Operation, deadline_s: float, out: Flat, data: Flat) -> None:
        self._wait(operation, deadline_s, self.start_swap(out, data, deadline_s))

    def _alone(self, operation: Operation) -> None:
        if operation.source is not None and operation.target is not None:
            reduce(operation.target, [operation.source], operation.reduce_op, operation.dtype)

    # ---- movement ----

    def _all_gather(self, operation: Operation, deadline_s: float) -> None:
        source, target = _array(operation.source), _array(operation.target)
        if self._size == 1 or not (len(source) or operation.output_splits):
            np.copyto(target, source)
            return
        if operation.output_splits:  # Gloo has none: the same bytes, each rank's sent to each
            outs = [count * source.itemsize for count in operation.output_splits]
            copies, ins = np.tile(source, self._size), [source.nbytes] * self._size
            work = self._transport.all_to_all(target, copies, outs, ins)
            self._wait(operation, deadline_s, work)
        elif self._size == 2:
            rows = target.reshape(2, len(source))
            self._swap(operation, deadline_s, rows[1 - self._rank], source)
            np.copyto(rows[self._rank], source)
        else:
            self._wait(operation, deadline_s, self._transport.all_gather(target, source))

    def _broadcast(self, operation: Operation, deadline_s: float) -> None:
        is_root = self._rank == operation.root
        data = _array(operation.source if is_root else operation.target)
        if self._size > 1 and len(data):
            self._wait(operation, deadline_s, self._transport.broadcast(data, operation.root))

    def _all_to_all(self, operation: Operation, deadline_s: float) -> None:
        source, target = _array(operation.source), _array(operation.target)
        if self._size == 1:
            np.copyto(target, source)
            return
        self._agree_on_splits(operation, deadline_s)
        ins = [count * source.itemsize for count in operation.input_splits]
        outs = [count * target.itemsize for count in operation.output_splits]
        self._wait(operation, deadline_s, self._transport.all_to_all(target, source, outs, ins))

    def _agree_on_splits(self, operation: Operation, deadline_s: float) -> None:
        mine = np.array([*operation.input_splits, *operation.output_splits], np.int64)
        tables = np.empty((self._size, len(mine)), np.int64)
        self._wait(operation, deadline_s, self._transport.all_gather(tables.reshape(-1), mine))
        sent, wanted = tables[:, : self._size], tables[:, self._size :].T
        if (sent != wanted).any():
            pairs = np.argwhere(sent != wanted)
            raise split_error(self._members, operation, sorted(set(pairs.reshape(-1).tolist())))

    def _gather(self, operation: Operation, deadline_s: float) -> None:
        source, target = _array(operation.source), operation.target
        if self._size == 1 or not len(source):
            if target is not None:
                np.copyto(target, source)
            return
        rows = None if target is None else list(target.reshape(self._size, len(source)))
        self._wait(operation, deadline_s, self._transport.gather(rows, source, operation.root))

    def _scatter(self, operation: Operation, deadline_s: float) -> None:
        source, target = operation.source, _array(operation.target)
        if self._size == 1 or not len(target):
            if source is not None:
                np.copyto(target, source)
            return
        rows = None if source is None else list(source.reshape(self._size, len(target)))
        self._wait(operation, deadline_s, self._transport.scatter(target, rows, operation.root))

    # ---- messages: a head with dtype and size, then the data, in this order under one tag ----

    def _message(self, operation: Operation, deadline_s: float) -> None:
        tag = operation.tag
        if operation.kind == "send":
            source = _array(operation.source)
            head = np.frombuffer(
                _MESSAGE.pack(operation.dtype.encode(), source.nbytes), np.uint8
            ).copy()
            works = [(self._transport.send(head, operation.peer, tag), head)]
            if source.nbytes:
                works.append((self._transport.send(source, operation.peer, tag), source))
            for work, _ in works:
                self._wait_message(deadline_s, work)
            return
        target = _array(operation.target)
        head = np.empty(_MESSAGE.size, np.uint8)
        self._wait_message(deadline_s, self._transport.receive(head, operation.peer, tag))
        dtype, num_bytes = _MESSAGE.unpack(head.tobytes())
        if dtype.rstrip(b"\0").decode() != operation.dtype or num_bytes != target.nbytes:
            raise message_error(self._members, operation, sorted((self._rank, operation.peer)))
        if target.nbytes:
            work = self._transport.receive(target, operation.peer, tag)
            self._wait_message(deadline_s, work)

    def _wait_message(self, deadline_s: float, work: Any) -> None:
        """Not in slices: a wait that times out closes the connections. `break_off` ends it."""
        left_s = max(0.001, deadline_s - time.monotonic())
        work.wait(timedelta(seconds=left_s))


def _array(data: Flat | None) -> Flat:
    assert data is not None
    return data
