"""Define the base class of a group's calls.

Every operation is numbered and recorded by this class before the engine receives it, so the black
box never misses an operation. The subclasses check the arguments of every call, so an engine never
receives invalid arguments.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NoReturn, TypeAlias

import echelon.recorder.current as black_box
from echelon.dist.backends.interface import Engine, Members
from echelon.dist.operation.arrays import View, view
from echelon.dist.operation.checks import check_rank, check_timeout
from echelon.dist.operation.operation import ANY_SOURCE, OPEN, Operation, encode_call
from echelon.dist.progress.evidence import Evidence
from echelon.dist.progress.group_state import GroupState
from echelon.dist.work import Work
from echelon.errors import CollectiveError
from echelon.recorder.format.schema import Flag
from echelon.recorder.write import sites
from echelon.recorder.write.recorder import NOT_RECORDED

Timeout: TypeAlias = float | timedelta | None
Splits: TypeAlias = Sequence[int] | None

_MAX_CALLS = 1024
_ASYNC = int(Flag.ASYNC)  # looking up a member of an enum costs as much as the rest of the flags
_P2P = int(Flag.P2P)


class _Coalesced(threading.local):
    """The `coalesce` block that the current thread has entered: its number and `Work` objects."""

    # On the class: looking for an attribute that is not there costs a small collective's tenth.
    batch: tuple[int, list[Work]] | None = None


class Calls:
    """The base class of a group's calls. A call checks its arguments and starts one operation."""

    def __init__(
        self, members: Members, engine: Engine, timeout_s: float, evidence: Evidence | None
    ) -> None:
        self._members = members
        self._engine = engine
        self._timeout_s = timeout_s
        self._state = GroupState(members, engine, evidence)
        self._state.evidence.serve(self._state)
        self._coalesced = _Coalesced()
        # Of collectives that the engine accepts: (what it compares, the prepared record).
        self._calls: dict[tuple[Any, ...], tuple[bytes, Any]] = {}
        recorder = black_box.current()
        self._reference = 0 if recorder is None else recorder.new_group(members.name, members.ranks)

    @property
    def rank(self) -> int:
        """This process's rank within the group."""
        return self._members.rank

    @property
    def size(self) -> int:
        """The number of members."""
        return self._members.size

    @property
    def ranks(self) -> tuple[int, ...]:
        """The members' global ranks, in group order."""
        return tuple(self._members.ranks)

    @property
    def name(self) -> str:
        """The group's name, as shown in verdicts."""
        return self._members.name

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
        call, prepared = self._calls.get(key) or self._new_call(key, shown)
        limit_s = self._timeout_s if timeout_s is None else check_timeout(timeout_s)
        if timeout_s is not None or input_splits or output_splits:
            prepared = None
        with state.collectives as is_nested:
            # By position: this is the hot path, and 15 keywords cost more than their values.
            operation = Operation(
                kind, state.num_collectives, dtype, device, reduce_op, root, -1, 0,
                None if source is None else source.data,
                None if target is None else target.data,
                input_splits, output_splits, compared or (), limit_s, call,
            )  # fmt: skip
            recorder = black_box.current()
            is_plain = device == "cpu" and not async_op and self._coalesced.batch is None
            if not is_plain or (prepared is None and recorder is not None):
                return self._dispatch(operation, shown, async_op, is_nested=is_nested)
            # What `_dispatch` does, without its frames: the recorder looks at each one.
            try:
                state.admit(operation, is_nested=is_nested)
            except CollectiveError as err:
                record = self._record(operation, shown, async_op, is_started=False)
                self._raise_failure(err, record)
            record = NOT_RECORDED
            if recorder is not None:
                record = recorder.begin_prepared(prepared, operation.sequence, -1, 0, 2, True)
            self._execute(operation, record)
            return None

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
        """Return whether a blocking operation runs on the calling thread, without a `Work`."""
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
        """Number, record and launch one operation.

        The caller must hold the group's lock for operations of this kind (collectives or messages).
        If `waits` is False, the caller must wait for the returned work.
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
        """Number and record an operation; raise an error if the group cannot start it."""
        try:
            self._state.admit(operation, is_nested=is_nested)
        except CollectiveError as err:
            self._raise_failure(err, self._record(operation, shown, async_op, is_started=False))
        return self._record(operation, shown, async_op)

    def _raise_failure(self, err: BaseException, record: int) -> NoReturn:
        """Record an exception and raise it.

        If the exception is a `CollectiveError`, add the file and line of the user's call.
        """
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
                depth=3,
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
            depth=3,
            is_started=is_started,
        )

    # ---- checks ----

    def _batch(self) -> tuple[int, list[Work]] | None:
        return self._coalesced.batch

    def _check_use(self, kind: str, shown: View | None, reduce_op: str) -> None:
        if self._state.is_foreign or self._state.is_closed:
            self._refuse_use()
        if shown is None or shown.device != self._engine.device:
            return  # the engine's `prepare` refuses it, if it does
        reason = self._engine.refuses(kind, shown.dtype, reduce_op)
        if reason:
            raise ValueError(f"{kind} of {shown}: backend {self._engine.name!r} {reason}")

    def _refuse_use(self) -> NoReturn:
        if self._state.is_foreign:
            raise ValueError(
                f"group {self.name!r} belongs to another process; a forked child cannot use it"
            )
        raise ValueError(f"group {self.name!r} is shut down")

    def _new_call(self, key: tuple[Any, ...], shown: View | None) -> tuple[bytes, Any]:
        """Encode and prepare a collective, and cache the result.

        Raises:
            ValueError: the group is closed or belongs to another process, or the engine does not
                support the collective.
        """
        kind, reduce_op, dtype, root = key[:4]
        self._check_use(kind, shown, reduce_op)
        if len(self._calls) >= _MAX_CALLS:
            self._calls.clear()
        recorder = black_box.current()
        prepared = None
        if recorder is not None:
            shapes, num_bytes = ((), 0) if shown is None else ((shown.shape,), shown.data.nbytes)
            prepared = recorder.prepare(
                self._reference, kind, dtype, shapes, num_bytes, reduce_op,
                -1 if root < 0 else self._members.ranks[root], self._timeout_s,
            )  # fmt: skip
        call = self._calls[key] = encode_call(*key), prepared
        return call

    def _limit(self, timeout_s: Timeout) -> float:
        return self._timeout_s if timeout_s is None else check_timeout(timeout_s)

    def _check_any_source(self, data: View, async_op: bool) -> None:
        if data.device != "cpu":
            raise ValueError(
                f"recv of {data} from any rank is not supported on {data.device}: pass the "
                "source rank"
            )
        if self._batch() is not None and not async_op:
            raise ValueError(
                "recv from any rank inside coalesce() needs async_op=True: the source is "
                "known only after the block ends, from the returned work"
            )

    def _check_rank(self, rank: Any, name: str) -> int:
        return check_rank(rank, name, self.name, self.size)

    def _check_peer(self, rank: Any, name: str) -> int:
        number = self._check_rank(rank, name)
        if number == self.rank:
            raise ValueError(f"{name} {rank}: a rank cannot exchange messages with itself")
        return number

    def _rooted(self, array: Any, name: str, root: int, *, writable: bool) -> View | None:
        if root == self.rank:
            return view(array, name, writable=writable)
        if array is not None:
            raise ValueError(f"only root {root} may pass {name}: pass None on rank {self.rank}")
        return None
