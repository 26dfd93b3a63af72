"""Read a torch operation's arguments from a call to its operator.

torch's C++ and Python code both start a collective by calling an operator in the namespace c10d. A
table in this module lists the positions of each operator's arguments.

[Note: flat shapes] torch accepts tensors of different shapes but equal sizes in one collective.
Therefore only the number of elements is recorded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

_ABSENT = -1
_REDUCE_OPS = ("sum", "avg", "product", "min", "max", "band", "bor", "bxor", "premul_sum")


@dataclass(frozen=True, slots=True)
class Layout:
    """The positions of an operator's arguments; -1 means that the operator lacks the argument."""

    operation: str
    data: int
    group: int
    reduce_op: int = _ABSENT
    root: int = _ABSENT
    is_async: int = _ABSENT
    timeout: int = _ABSENT
    peer: int = _ABSENT
    tag: int = _ABSENT
    is_message: bool = False


LAYOUTS = {
    "allreduce_": Layout("all_reduce", 0, 1, reduce_op=2, is_async=4, timeout=5),
    "allreduce_coalesced_": Layout("all_reduce", 0, 1, reduce_op=2, is_async=3, timeout=4),
    "allgather_": Layout("all_gather", 1, 2, is_async=3, timeout=4),
    "_allgather_base_": Layout("all_gather", 1, 2, is_async=3, timeout=4),
    "allgather_coalesced_": Layout("all_gather", 1, 2, is_async=3),
    "allgather_into_tensor_coalesced_": Layout("all_gather", 1, 2, is_async=3),
    "reduce_scatter_": Layout("reduce_scatter", 1, 2, reduce_op=3, is_async=4, timeout=5),
    "_reduce_scatter_base_": Layout("reduce_scatter", 1, 2, reduce_op=3, is_async=4, timeout=5),
    "reduce_scatter_tensor_coalesced_": Layout(
        "reduce_scatter", 1, 2, reduce_op=3, is_async=4, timeout=5
    ),
    "reduce_": Layout("reduce", 0, 1, reduce_op=2, root=3, is_async=5, timeout=6),
    "broadcast_": Layout("broadcast", 0, 1, root=2, is_async=4, timeout=5),
    "gather_": Layout("gather", 1, 2, root=3, is_async=4, timeout=5),
    "scatter_": Layout("scatter", 0, 2, root=3, is_async=4, timeout=5),
    "alltoall_": Layout("all_to_all", 1, 2, is_async=3, timeout=4),
    "alltoall_base_": Layout("all_to_all", 1, 2, is_async=5, timeout=6),
    "barrier": Layout("barrier", 0, 1, is_async=3, timeout=4),
    "monitored_barrier_": Layout("monitored_barrier", 0, 1, timeout=3),
    "send": Layout("send", 0, 1, peer=2, tag=3, is_message=True),
    "recv_": Layout("recv", 0, 1, peer=2, tag=3, is_message=True),
    "recv_any_source_": Layout("recv", 0, 1, tag=2, is_message=True),
}

_WITHOUT_DATA = frozenset({"barrier", "monitored_barrier"})
_dtypes: dict[Any, str] = {}


class Data(NamedTuple):
    """The dtype, shapes and size of an operation's tensors, and whether they are on the host."""

    on_host: bool
    dtype: str = ""
    shapes: tuple[tuple[int, ...], ...] = ()
    num_bytes: int = 0


_NO_DATA = Data(on_host=True)


def data_of(layout: Layout, args: Sequence[Any]) -> Data:
    """Describe the tensors of a call."""
    value = args[layout.data]
    if type(value) is not list and not isinstance(value, (list, tuple)):
        return _described(value, ((value.numel(),),))
    if not value:
        return _NO_DATA
    first = value[0]
    if layout.operation in _WITHOUT_DATA:
        return Data(on_host=first.is_cpu)
    if isinstance(first, (list, tuple)):
        if not first:
            return _NO_DATA
        return _described(first[0], ((sum(tensor.numel() for tensor in first),),))
    if len(value) == 1:
        return _described(first, ((first.numel(),),))
    return _described(first, tuple((tensor.numel(),) for tensor in value))


def _described(first: Any, shapes: tuple[tuple[int, ...], ...]) -> Data:
    kind = first.dtype
    dtype = _dtypes.get(kind)
    if dtype is None:
        dtype = _dtypes[kind] = str(kind).removeprefix("torch.")
    num_elements = shapes[0][0] if len(shapes) == 1 else sum(shape[0] for shape in shapes)
    return Data(first.is_cpu, dtype, shapes, num_elements * first.element_size())


def address_of(value: Any) -> int:
    """Return the data pointer of the first tensor in a nested list, or 0 if the list is empty."""
    while isinstance(value, (list, tuple)) and value:
        value = value[0]
    return 0 if isinstance(value, (list, tuple)) else int(value.data_ptr())


def reduce_op_of(layout: Layout, args: Sequence[Any]) -> str:
    """Return the name of a call's reduce operation, or "" if it has none."""
    if layout.reduce_op == _ABSENT:
        return ""
    # Uses the method that finds it directly: `.op` looks in two places first.
    number = int(args[layout.reduce_op].__getattr__("op")())
    return _REDUCE_OPS[number] if 0 <= number < len(_REDUCE_OPS) else ""


def number_of(at: int, args: Sequence[Any], default: int = -1) -> int:
    """Return an integer argument of a call, or `default` if it was not passed."""
    return int(args[at]) if 0 <= at < len(args) else default


def timeout_s_of(layout: Layout, args: Sequence[Any]) -> float:
    """Return the timeout passed to a call, in seconds, or 0 if none was passed."""
    return max(number_of(layout.timeout, args, 0), 0) / 1e3
