"""Record torch.distributed's operations on host tensors, for all callers and backends.

[Note: where operations are seen] DDP's reducer, functional collectives and compiled code call a
process group in C++, so patched Python functions would miss these calls. All callers go through
torch's dispatcher to an operator in the namespace c10d. A kernel is registered under the dispatch
key BackendSelect, which c10d does not use. The kernel records the call and redispatches it
unchanged. This costs about 15 us per operation, of which torch's dispatcher takes 10 us.

Operations on device tensors are not recorded, because querying the device for their completion
could block. The ring notes that such operations occurred; torch's own recorder contains them.

Echelon's own backend records its operations itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any

import echelon.recorder.current as black_box
from echelon.recorder.format.schema import Flag
from echelon.recorder.spent import spent
from echelon.recorder.torch.calls import (
    LAYOUTS,
    Layout,
    address_of,
    data_of,
    number_of,
    reduce_op_of,
    timeout_s_of,
)
from echelon.recorder.torch.groups import Groups
from echelon.recorder.torch.guarding import quietly, replace
from echelon.recorder.torch.pending import Pending
from echelon.recorder.torch.spans import ended_loaders, mark_ended_loaders
from echelon.recorder.write.operations.signatures import MAX_CALLS
from echelon.recorder.write.recorder import NOT_RECORDED, Recorder

_KEY = "BackendSelect"
_ASYNC, _P2P = int(Flag.ASYNC), int(Flag.P2P)


def _redispatch_of(operator: Any) -> Callable[..., Any]:
    """Return the function that redispatches a call to an operator's next kernel."""
    handle = getattr(operator, "_handle", None)
    redispatch: Callable[..., Any] = getattr(handle, "redispatch_boxed", operator.redispatch)
    return redispatch


class Operations:
    """A recorder of calls to the c10d operators. `install` activates the recorder."""

    def __init__(self, torch: Any) -> None:
        core = torch._C._distributed_c10d
        self._torch = torch
        self._unbox_group = core.ProcessGroup.unbox
        self._unbox_work = core.Work.unbox
        self._work_type = core.Work
        self._below = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)
        self._libraries: list[Any] = []  # a kernel is registered for as long as its library lives
        self._task = -1  # the backward pass whose end is awaited
        self._had_device = False
        self._task_now = getattr(torch._C, "_current_graph_task_id", lambda: -1)
        self._prepared: dict[tuple[Any, ...], Any] = {}
        self.groups = Groups()
        self.pending = Pending(core.Work.wait)

    def install(self) -> None:
        """Register the recording kernels with torch's dispatcher.

        Raises:
            Exception: torch's dispatcher has an unexpected interface.
        """
        library = self._torch.library.Library("c10d", "IMPL")
        self._libraries.append(library)
        for name, layout in LAYOUTS.items():
            operator = quietly(getattr, self._torch.ops.c10d, name)
            if operator is not None:
                kernel = self._kernel(layout, operator.default)
                library.impl(name, kernel, _KEY, with_keyset=True)
        functional = self._torch.library.Library("_c10d_functional", "IMPL")
        self._libraries.append(functional)
        waiting = self._torch.ops._c10d_functional.wait_tensor.default
        functional.impl("wait_tensor", self._waiting_kernel(waiting), _KEY, with_keyset=True)
        replace(self._work_type, "wait", self._waiting)
        self.pending.start()

    def _kernel(self, layout: Layout, operator: Any) -> Callable[..., Any]:
        below, pending, redispatch = self._below, self.pending, _redispatch_of(operator)
        begin, follow, works = self._begin, self._follow, self.pending.works

        def call(keys: Any, *args: Any, **named: Any) -> Any:
            record, recorder = NOT_RECORDED, black_box.if_opened()
            if recorder is not None:
                try:
                    if works:
                        pending.sweep_oldest()
                    if ended_loaders:
                        mark_ended_loaders()
                    record = begin(recorder, layout, args)
                except Exception:  # noqa: BLE001 -- a program trains without its record
                    record = NOT_RECORDED
            if record == NOT_RECORDED:
                return redispatch(keys & below, *args, **named)
            assert recorder is not None
            try:
                result = redispatch(keys & below, *args, **named)
            except BaseException as err:
                recorder.failed(record, err)
                raise
            try:
                follow(recorder, record, result, layout, args)
            except Exception:  # noqa: BLE001 -- as above
                recorder.completed(record)
            return result

        return call

    def _begin(self, recorder: Recorder, layout: Layout, args: Sequence[Any]) -> int:
        data = data_of(layout, args)
        if not data.on_host:
            self._note_device(recorder)
            return NOT_RECORDED
        group = self.groups.of(self._unbox_group(args[layout.group]), recorder)
        if layout.is_message:
            peer = group.global_rank(number_of(layout.peer, args))
            return recorder.begin(
                group.reference,
                layout.operation,
                p2p_sequence=group.next_message(layout.operation, peer),
                dtype=data.dtype,
                shapes=data.shapes,
                num_bytes=data.num_bytes,
                peer=peer,
                tag=number_of(layout.tag, args),
                flags=_P2P,
                is_started=True,
            )
        root = -1 if layout.root < 0 else group.global_rank(number_of(layout.root, args))
        call = (
            group.reference, layout.operation, data.dtype, data.shapes, data.num_bytes,
            reduce_op_of(layout, args), root, timeout_s_of(layout, args),
        )  # fmt: skip
        prepared = self._prepared.get(call)
        if prepared is None:
            prepared = self._prepare(recorder, call)
        flags = _ASYNC if number_of(layout.is_async, args, 1) else 0
        return recorder.begin_prepared(prepared, group.next_collective(), -1, flags, 1, True)

    def _prepare(self, recorder: Recorder, call: tuple[Any, ...]) -> Any:
        """Preprocess the arguments of a call, and cache the result for equal calls."""
        if len(self._prepared) >= MAX_CALLS:
            self._prepared.clear()
        prepared = self._prepared[call] = recorder.prepare(*call)
        return prepared

    def _follow(
        self, recorder: Recorder, record: int, result: Any, layout: Layout, args: Sequence[Any]
    ) -> None:
        """Track the `Work` that an operation started.

        An operation that returned no `Work` counts as complete.
        """
        boxed = result[-1] if isinstance(result, tuple) and result else result
        if boxed is None or isinstance(boxed, tuple):
            recorder.completed(record)
            return
        work = self._unbox_work(boxed)
        self.pending.add(record, work, layout.is_message, address_of(args[0]))
        task = self._task_now()
        if task not in (-1, self._task):
            self._task = task
            self._after_backward(lambda: self._after_backward(self.pending.sweep))

    def _after_backward(self, run: Callable[[], None]) -> None:
        """Call `run` when the backward pass ends, after all callbacks that are already queued."""
        self._torch.autograd.Variable._execution_engine.queue_callback(lambda: quietly(run))

    def _waiting_kernel(self, operator: Any) -> Callable[..., Any]:
        below, pending, redispatch = self._below, self.pending, operator.redispatch

        def call(keys: Any, *args: Any, **named: Any) -> Any:
            before_s, began_s = spent.collectives_s, monotonic()
            result = redispatch(keys & below, *args, **named)
            spent.collectives_s = before_s + monotonic() - began_s
            quietly(lambda: pending.finish_at(address_of(args[0])))
            return result

        return call

    def _waiting(self, original: Any) -> Callable[..., Any]:
        pending = self.pending

        # pybind11 recognizes an overriding method by its name and first argument.
        def wait(self: Any, *args: Any, **named: Any) -> Any:
            before_s, began_s = spent.collectives_s, monotonic()
            try:
                result = original(self, *args, **named)
                spent.collectives_s = before_s + monotonic() - began_s
            except Exception as err:
                quietly(pending.fail, self, err)
                raise
            try:
                pending.finish(self)
            except Exception:  # noqa: BLE001 -- a program trains without its record
                return result
            return result

        wait.__doc__ = original.__doc__
        return wait

    def _note_device(self, recorder: Recorder) -> None:
        if not self._had_device:
            self._had_device = True
            settings = {**recorder.identity.settings, "device_operations": True}
            recorder.identify(settings=settings)
