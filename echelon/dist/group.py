"""ProcessGroup: the one place where every operation passes.

Here, and only here, an operation's arguments are checked, it gets its number in the group, it is
recorded, and it is handed to the engine. An engine therefore never sees a bad argument, and the
black box never misses an operation.
"""

from __future__ import annotations

import contextlib
import operator
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import echelon.recorder.current as black_box
from echelon.dist import objects
from echelon.dist.backends.interface import Engine, Members
from echelon.dist.calls.base import Timeout
from echelon.dist.calls.collectives import Collectives
from echelon.dist.calls.point_to_point import PointToPoint
from echelon.dist.channel import Channel, ChannelTags
from echelon.dist.operation.arrays import View
from echelon.dist.operation.checks import check_timeout
from echelon.dist.operation.operation import ANY_SOURCE, OPEN, Operation, encode_call
from echelon.dist.progress.group_state import Evidence, GroupState
from echelon.dist.work import Work
from echelon.errors import CollectiveError
from echelon.recorder import sites
from echelon.recorder.recorder import NOT_RECORDED
from echelon.recorder.schema import Flag

_MAX_CALLS = 1024
_ASYNC = int(Flag.ASYNC)  # looking up a member of an enum costs as much as the rest of the flags
_P2P = int(Flag.P2P)

MakeGroup = Callable[[Sequence[int], str, str], "ProcessGroup | None"]


class ProcessGroup(Collectives, PointToPoint):
    """Ranks that act together. Made by `init`, `new_group` and `split`, never directly.

    Every call is collective: all members make the same calls in the same order; `send` and `recv`
    concern their two ends only. Arrays are NumPy arrays, torch tensors, CuPy arrays or other DLPack
    arrays, contiguous; results are written in place. `root`, `to` and `source` are ranks within the
    group. Calls raise

    * ValueError before anything is sent, if an argument cannot be carried;
    * CollectiveMismatchError on every rank, if members called different things;
    * CollectiveTimeoutError, if members did not call within the call's timeout: `timeout_s`, or
      where it is None the group's;
    * PeerLostError, if a member died or left.

    After the last three the group cannot be used any more: later calls raise, and name the first
    error. Several threads may call at once; collectives of one group run in the order of the calls,
    which must be the same on all ranks. With `async_op=True` a call returns a `Work` at once and
    raises from its `wait()`.
    """

    def __init__(
        self,
        members: Members,
        engine: Engine,
        timeout_s: float,
        make_group: MakeGroup,
        evidence: Evidence | None = None,
        channels: ChannelTags | None = None,
    ) -> None:
        self._members = members
        self._engine = engine
        self._timeout_s = timeout_s
        self._make_group = make_group
        self._state = GroupState(members, engine, evidence)
        self._state.evidence.serve(self._state)
        self.created_mono_ns = time.monotonic_ns()
        self._num_splits = 0
        self._channels = channels
        self._coalesced = threading.local()
        self._calls: dict[tuple[Any, ...], bytes] = {}  # of collectives the engine accepts
        recorder = black_box.current()
        self._reference = 0 if recorder is None else recorder.new_group(members.name, members.ranks)

    # ---- who we are ----

    @property
    def backend(self) -> str:
        """The backend's name."""
        return self._engine.name

    @property
    def timeout_s(self) -> float:
        """How long an operation of this group may take."""
        return self._timeout_s

    @timeout_s.setter
    def timeout_s(self, seconds: float) -> None:
        self._timeout_s = check_timeout(seconds)

    @property
    def num_collectives(self) -> int:
        """How many collectives were called on this rank so far."""
        return self._state.num_collectives

    def __repr__(self) -> str:
        return f"ProcessGroup({self.name!r}, rank {self.rank} of {self.size}, {self.backend})"

    # ---- objects ----

    def broadcast_object(self, obj: Any, root: int, timeout_s: Timeout = None) -> Any:
        """Return the object of `root` on every rank: plain data that msgpack can hold.

        None, bool, numbers, text, bytes, lists and dicts; a tuple arrives as a list. Blocks until
        the root has called it.

        Args:
            obj: the object on `root`; ignored elsewhere.
            root: rank within this group.
            timeout_s: limit of each of its two collectives; None: the group's.

        Raises:
            TypeError: the object holds something else.
            ValueError: called inside `coalesce()`.
        """
        root = self._check_object_call("broadcast_object", root)
        data = objects.encode(obj) if self.rank == root else None
        return objects.broadcast(self, data, root, timeout_s)

    def all_gather_object(self, obj: Any, timeout_s: Timeout = None) -> list[Any]:
        """Return every rank's object on every rank, in the order of the ranks.

        See `broadcast_object` for the objects and for what is raised.
        """
        self._check_object_call("all_gather_object")
        return objects.all_gather(self, objects.encode(obj), timeout_s)

    def gather_object(self, obj: Any, root: int, timeout_s: Timeout = None) -> list[Any] | None:
        """Return every rank's object on `root`, in the order of the ranks; None elsewhere.

        See `broadcast_object` for the objects and for what is raised.
        """
        root = self._check_object_call("gather_object", root)
        return objects.gather(self, objects.encode(obj), root, timeout_s)

    def scatter_object(
        self, objs: Sequence[Any] | None, root: int, timeout_s: Timeout = None
    ) -> Any:
        """Return this rank's object of the list that `root` passes.

        See `broadcast_object` for the objects and for what is raised.

        Args:
            objs: on `root` one object per rank, in the order of the ranks; ignored elsewhere.
            root: rank within this group.
            timeout_s: limit of each of its two collectives; None: the group's.
        """
        root = self._check_object_call("scatter_object", root)
        parts = None
        if self.rank == root:
            if objs is None or len(objs) != self.size:
                raise ValueError(
                    f"scatter_object: root {root} must pass a list of {self.size} object(s), got "
                    f"{'None' if objs is None else len(objs)}"
                )
            parts = [objects.encode(obj) for obj in objs]
        return objects.scatter(self, parts, root, timeout_s)

    # ---- several at once ----

    @contextlib.contextmanager
    def coalesce(self) -> Iterator[None]:
        """Launch the operations called inside together; all are done when the block ends.

        What the block itself raises is passed on. On a device nothing is launched then, and if the
        block had called an operation, the group ends: the other ranks may have launched theirs.
        """
        if self._batch() is not None:
            raise ValueError("coalesce() does not nest")
        recorder = black_box.current()
        number = -1 if recorder is None else recorder.next_coalesced()
        works: list[Work] = []
        self._coalesced.batch = (number, works)
        try:
            with self._engine.batch():
                yield
        except BaseException:
            self._state.sweep()  # what was called and not launched ends the group, at once
            raise
        finally:
            self._coalesced.batch = None
        for work in works:
            work.wait()

    def split(self, color: int | None, key: int = 0, name: str | None = None) -> Any:
        """Divide the group: ranks of equal `color` form one, ordered by `key`, then rank.

        Every member calls it. Returns this rank's new ProcessGroup; None for color None.

        Raises:
            TypeError: `color` or `key` is not an integer.
        """
        self._check_object_call("split")
        color, key = None if color is None else operator.index(color), operator.index(key)
        color = color if color is None else int(color)  # True and 1 are one color
        number = self._num_splits
        self._num_splits += 1
        chosen = self.all_gather_object([color, key])
        if color is None:
            return None
        alike = [rank for rank in range(self.size) if chosen[rank][0] == color]
        alike.sort(key=lambda rank: (chosen[rank][1], rank))
        ranks = [self.ranks[rank] for rank in alike]
        title = name or f"{self.name}/{color}"
        return self._make_group(ranks, title, f"split/{number}/{color}")

    def channel(self, peer: int, name: str) -> Channel:
        """Return a lane to another rank, ordered per pair and name, independent of everything else.

        Both ends call this, in any order and at any time; neither waits for the other. Asks the
        store, within its timeout, when a name is first used; the same name is the same channel. It
        carries arrays of the host and of a device, each kind in its own order; `Channel.open`
        connects it for a device before the first message does.

        Args:
            peer: rank at the other end, within this group.
            name: any text that the other end names too.

        Raises:
            ValueError: there is no such rank, it is this one, or the name is empty.
            StoreError: the store does not answer.
        """
        peer = self._check_peer(peer, "peer")
        if not isinstance(name, str) or not name:
            raise ValueError(f"name {name!r}: a channel needs a name")
        if self._channels is None:
            raise ValueError(f"group {self.name!r} has no store, which channels need")
        return Channel(peer, name, self._channels.tag(peer, name), self._message)

    # ---- the end ----

    def abort(self) -> None:
        """End the group on all ranks: what waits in it raises CollectiveError.

        Callable from any thread and from a signal handler. Returns within 1 s; asks no other rank.
        """
        if not self._state.is_closed and not self._state.is_foreign:
            self._state.abort()

    def close(self) -> None:
        """End the group on this rank and release what it holds. Safe to call twice.

        Takes at most 1 s, and asks no other rank. Ranks that still need this one raise
        PeerLostError. Called by a signal handler during a call of this group, it ends that call,
        which then releases the group.
        """
        self._state.close()

    @property
    def state(self) -> GroupState:
        """What the group has called and how it ended; outlives the group if that is dropped."""
        return self._state

    # ---- dispatch ----

    def _collective(
        self,
        kind: str,
        source: View | None,
        target: View | None,
        *,
        reduce_op: str = "",
        root: int = -1,
        input_splits: tuple[int, ...] = (),
        output_splits: tuple[int, ...] = (),
        splits: tuple[int, ...] = (),
        timeout_s: Timeout = None,
        async_op: bool = False,
    ) -> Work | None:
        is_part = kind == "scatter" or (kind == "all_gather" and splits)
        shown = target if is_part or source is None else source
        if shown is None:
            dtype, device, compared = "", "cpu", None
        else:
            dtype, device, compared = shown.dtype, shown.device, shown.shape
        state = self._state
        if state.is_foreign or state.is_closed:
            self._refuse_use()
        key = (kind, reduce_op, dtype, root, compared, device, splits)
        call = self._calls.get(key) or self._new_call(key, shown)
        limit_s = self._timeout_s if timeout_s is None else check_timeout(timeout_s)
        with state.collectives as is_nested:
            # By position: this is the hot path, and 15 keywords cost more than their values.
            operation = Operation(
                kind, state.num_collectives, dtype, device, reduce_op, root, -1, 0,
                None if source is None else source.data,
                None if target is None else target.data,
                input_splits, output_splits, compared or (), limit_s, call,
            )  # fmt: skip
            return self._dispatch(operation, shown, async_op, is_nested=is_nested)

    def _message(
        self, kind: str, peer: int, data: View, tag: int, *, timeout_s: Timeout, async_op: bool
    ) -> Work | None:
        self._check_use(kind, data, "")
        if peer == ANY_SOURCE:
            self._check_any_source(data, async_op)
        is_blocking = not async_op and self._batch() is None
        with self._state.messages:
            operation = Operation(
                kind=kind,
                sequence=self._state.next_message(kind, peer),
                dtype=data.dtype,
                device=data.device,
                peer=peer,
                tag=tag,
                source=data.data if kind == "send" else None,
                target=data.data if kind != "send" else None,
                shape=data.shape,
                timeout_s=self._limit(timeout_s),
                is_detached=kind == "send" and is_blocking and data.device != "cpu",
            )
            if is_blocking and self._is_inline(operation):
                record = self._admit(operation, data, async_op)
            else:
                work = self._dispatch(operation, data, async_op, waits=False)
                record = None
        if record is not None:
            self._execute(operation, record)
            return None
        if is_blocking and work is not None:  # other threads may send while this one waits
            work.wait()
        return work if async_op or peer == ANY_SOURCE else None

    def _is_inline(self, operation: Operation) -> bool:
        """Return whether a blocking operation runs on this thread: its result is all there is."""
        is_open = operation.kind == OPEN
        return operation.device == "cpu" and operation.peer != ANY_SOURCE and not is_open

    def _dispatch(
        self,
        operation: Operation,
        shown: View | None,
        async_op: bool,
        *,
        is_nested: bool = False,
        waits: bool = True,
    ) -> Work | None:
        """Number, record and launch one operation; its turn is held.

        With `waits` false the caller waits, and gets the work for that.
        """
        batch = self._batch()
        record = self._admit(operation, shown, async_op, is_nested=is_nested)
        if not async_op and batch is None and self._is_inline(operation):
            self._execute(operation, record)
            return None
        try:
            work = self._state.launch(operation, record)
        except BaseException as err:  # noqa: BLE001 -- raised again
            self._raise_failure(err, record)
        if batch is not None:
            batch[1].append(work)
        elif not async_op and waits:
            work.wait()  # on a device: once it is in order behind what the caller has queued there
        return work if async_op or not waits else None

    def _admit(
        self, operation: Operation, shown: View | None, async_op: bool, *, is_nested: bool = False
    ) -> int:
        """Give an operation its number and its record, unless it is refused."""
        try:
            self._state.admit(operation, is_nested=is_nested)
        except CollectiveError as err:
            self._raise_failure(err, self._record(operation, shown, async_op, is_started=False))
        return self._record(operation, shown, async_op)

    def _raise_failure(self, err: BaseException, record: int) -> NoReturn:
        """Record a failure and raise it; one of the group names the caller's line."""
        recorder = None if record == NOT_RECORDED else black_box.current()
        if recorder is not None:
            recorder.failed(record, err)
        if not isinstance(err, CollectiveError):
            raise err
        frame = sites.caller(1)
        if frame is not None and "Called at" not in str(err):
            err.args = (f"{err}. Called at {frame.f_code.co_filename}:{frame.f_lineno}",)
        # The message says it all; a user's traceback should end in the user's code, not here.
        cause = err.__cause__
        raise err.with_traceback(None) from cause

    def _execute(self, operation: Operation, record: int) -> None:
        try:
            self._state.run(operation)
        except BaseException as err:  # noqa: BLE001 -- raised again
            self._raise_failure(err, record)
        recorder = None if record == NOT_RECORDED else black_box.current()
        if recorder is not None:
            recorder.completed(record)

    def _record(
        self, operation: Operation, shown: View | None, async_op: bool, *, is_started: bool = True
    ) -> int:
        recorder = black_box.current()
        if recorder is None or operation.kind == OPEN:  # it moves nothing
            return NOT_RECORDED
        batch = self._batch()
        if operation.peer == -1:
            root = operation.root
            return recorder.begin(
                self._reference,
                operation.kind,
                sequence=operation.sequence,
                dtype=operation.dtype,
                shapes=() if shown is None else (shown.shape,),
                input_splits=operation.input_splits,
                output_splits=operation.output_splits,
                num_bytes=0 if shown is None else shown.data.nbytes,
                reduce_op=operation.reduce_op,
                root=-1 if root < 0 else self._members.ranks[root],
                coalesced=-1 if batch is None else batch[0],
                timeout_s=operation.timeout_s,
                flags=_ASYNC if async_op else 0,
                depth=5,
                is_started=is_started,
            )
        return recorder.begin(
            self._reference,
            operation.kind,
            p2p_sequence=operation.sequence,
            dtype=operation.dtype,
            shapes=() if shown is None else (shown.shape,),
            num_bytes=0 if shown is None else shown.data.nbytes,
            peer=self._members.ranks[operation.peer] if operation.peer >= 0 else -1,
            tag=operation.tag,
            coalesced=-1 if batch is None else batch[0],
            timeout_s=operation.timeout_s,
            flags=_P2P | _ASYNC if async_op else _P2P,
            depth=4,
            is_started=is_started,
        )

    # ---- checks ----

    def _batch(self) -> tuple[int, list[Work]] | None:
        batch: tuple[int, list[Work]] | None = getattr(self._coalesced, "batch", None)
        return batch

    def _check_use(self, kind: str, shown: View | None, reduce_op: str) -> None:
        if self._state.is_foreign or self._state.is_closed:
            self._refuse_use()
        if shown is None or shown.device != self._engine.device:
            return  # the engine's `prepare` refuses it, if it does
        reason = self._engine.refuses(kind, shown.dtype, reduce_op)
        if reason:
            raise ValueError(f"{kind} of {shown}: backend {self.backend!r} {reason}")

    def _refuse_use(self) -> NoReturn:
        if self._state.is_foreign:
            raise ValueError(
                f"group {self.name!r} belongs to another process: a forked child cannot use it"
            )
        raise ValueError(f"group {self.name!r} is shut down")

    def _new_call(self, key: tuple[Any, ...], shown: View | None) -> bytes:
        """Encode a collective that the engine accepts; kept, up to a limit."""
        kind, reduce_op = key[:2]
        self._check_use(kind, shown, reduce_op)
        if len(self._calls) >= _MAX_CALLS:
            self._calls.clear()
        call = self._calls[key] = encode_call(*key)
        return call

    def _limit(self, timeout_s: Timeout) -> float:
        return self._timeout_s if timeout_s is None else check_timeout(timeout_s)

    def _check_any_source(self, data: View, async_op: bool) -> None:
        if data.device != "cpu":
            raise ValueError(f"recv of {data} from any rank: on {data.device} name the source")
        if self._batch() is not None and not async_op:
            raise ValueError(
                "recv from any rank inside coalesce(): pass async_op=True; its work names the "
                "source once the block has ended"
            )

    def _check_object_call(self, call: str, root: int = 0) -> int:
        if self._batch() is not None:
            raise ValueError(
                f"{call} cannot be called inside coalesce(): its second step needs the result of "
                "its first"
            )
        return self._check_rank(root, "root")
