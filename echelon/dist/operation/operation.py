"""Describe an operation whose arguments were checked and whose arrays were replaced by flat views.

The data that must be equal on all ranks is packed into `call`, a fixed number of bytes that any
engine can compare. `describe_call` decodes these bytes for error messages.
"""

from __future__ import annotations

import functools
import struct
from dataclasses import dataclass
from zlib import crc32

from echelon.dist.operation.arrays import Flat

COLLECTIVES = (
    "all_reduce",
    "reduce",
    "all_gather",
    "reduce_scatter",
    "broadcast",
    "all_to_all",
    "gather",
    "scatter",
    "barrier",
)
OPERATIONS = (*COLLECTIVES, "send", "recv")
OPEN = "open"  # of a channel: connects it for the arrays of a device, and moves nothing
REDUCE_OPS = ("sum", "avg", "min", "max", "prod", "band", "bor", "bxor")
ROOTED = frozenset({"reduce", "broadcast", "gather", "scatter"})
REDUCING = frozenset({"all_reduce", "reduce", "reduce_scatter"})

ANY_SOURCE = -2  # as the peer of a receive: the first message of its tag from any rank

_MAX_DIMS = 8
_MANY_DIMS = 255
_ANY = -1  # a dim that may differ between ranks
_MAX_SPLITS = 8  # of more, a checksum is compared and only their number is shown
_DTYPE_BYTES = 24  # longer names end in a checksum
# kind, reduction, number of dims, number of splits, root, checksum of the splits, dtype, device,
# dims, splits
_CALL = struct.Struct(f"<BBBxHxxiI{_DTYPE_BYTES}s8s{_MAX_DIMS}q{_MAX_SPLITS}q")
CALL_BYTES = _CALL.size
HEAD_BYTES = 8 + CALL_BYTES  # number and call


@dataclass(slots=True, eq=False)  # not frozen: that makes each one three times as expensive
class Operation:
    """An operation of one group.

    Attributes:
        kind: one of `OPERATIONS`, or `OPEN`.
        sequence: for a collective, its number in the group, from 0; for a send or receive, its
            number among the messages exchanged with this peer in this direction.
        dtype: the data's true dtype ("bfloat16" is stored as uint16); "" for a barrier.
        device: the device of the data: "cpu", "cuda", "xpu", ...; "cpu" for a barrier.
        reduce_op: one of `REDUCE_OPS`, or "" if the operation does not reduce.
        root: the group rank of the root, or -1 if the operation has no root.
        peer: the group rank at the other end of a send or receive; -1 for a collective; or
            `ANY_SOURCE` for a receive from any rank, in which case `Pending.source` becomes the
            sender's group rank.
        source, target: [numel] each, or None if this rank sends or receives nothing. Both are the
            same array for an in-place operation. The source of a reduce_scatter or scatter, and the
            target of an all_gather or gather, has the shape [group_size * n].
        input_splits, output_splits: the number of elements sent to and received from each rank; ()
            for equal splits. all_to_all always has both. An uneven all_gather has only
            `output_splits` (the `source` of rank r has `output_splits[r]` elements), and an uneven
            reduce_scatter has only `input_splits` (the `target` of rank r has `input_splits[r]`
            elements). In these two operations, the splits are the same on all ranks.
        shape: the shape that the caller passed; used in error messages.
        call: the data that must be equal on all ranks; b"" for a send or receive.
        is_detached: whether the operation is a device send that the caller does not wait for. If
            so, the caller can overwrite the array as soon as the call returns.
    """

    kind: str
    sequence: int
    dtype: str = ""
    device: str = "cpu"
    reduce_op: str = ""
    root: int = -1
    peer: int = -1
    tag: int = 0
    source: Flat | None = None
    target: Flat | None = None
    input_splits: tuple[int, ...] = ()
    output_splits: tuple[int, ...] = ()
    shape: tuple[int, ...] = ()
    timeout_s: float = 0.0
    call: bytes = b""
    is_detached: bool = False

    @property
    def is_message(self) -> bool:
        """True for a send, a receive or the opening of a channel, which involve only two ranks."""
        return self.peer != -1

    @property
    def head(self) -> bytes:
        """The bytes that ranks compare for a collective: `sequence` (8 bytes), then `call`."""
        return self.sequence.to_bytes(8, "little") + self.call

    def __str__(self) -> str:
        """Return a readable form of the operation, such as `all_reduce(sum) float32[3, 4]`."""
        if self.is_message:
            return f"{self.kind}(tag {self.tag}) {self.dtype}{list(self.shape)}"
        return describe_call(self.call)


def encode_dtype(dtype: str, num_bytes: int) -> bytes:
    """Encode a dtype's name in at most `num_bytes` bytes.

    A longer name is truncated and ends in a checksum, so that different names remain distinct.
    """
    name = dtype.encode()
    if len(name) <= num_bytes:
        return name
    checksum = b"~%08x" % crc32(name)
    return name[: num_bytes - len(checksum)] + checksum


@functools.lru_cache(maxsize=4096)
def encode_call(
    kind: str,
    reduce_op: str,
    dtype: str,
    root: int,
    shape: tuple[int, ...] | None,
    device: str = "cpu",
    splits: tuple[int, ...] = (),
) -> bytes:
    """Pack the properties of a call that must be equal on all ranks.

    Args:
        shape: the array's shape; None if there is no array.
        splits: the number of rows for each rank, if all ranks must pass the same splits.
    """
    dims = list(shape or ())
    if kind == "all_to_all" and dims:
        dims[0] = _ANY
    num_dims = len(dims)
    if num_dims > _MAX_DIMS:
        numel = 1
        for dim in dims:
            numel *= dim
        num_dims, dims = _MANY_DIMS, [numel, crc32(repr(dims).encode())]
    shown = list(splits) if len(splits) <= _MAX_SPLITS else []
    return _CALL.pack(
        OPERATIONS.index(kind),
        REDUCE_OPS.index(reduce_op) + 1 if reduce_op else 0,
        num_dims,
        len(splits),
        root,
        crc32(repr(splits).encode()) if splits else 0,
        encode_dtype(dtype, _DTYPE_BYTES),
        device.encode(),
        *(dims + [0] * (_MAX_DIMS - len(dims))),
        *(shown + [0] * (_MAX_SPLITS - len(shown))),
    )


def describe_call(call: bytes) -> str:
    """Return a readable form of an encoded call, such as `broadcast(root 0) float32[3, 4]`.

    If `call` is malformed, the text is meaningless, but no error is raised.
    """
    if len(call) < CALL_BYTES:
        return "nothing"
    kind, reduce_op, num_dims, num_splits, root, checksum, dtype, device, *numbers = (
        _CALL.unpack_from(call)
    )
    details = []
    if 0 < reduce_op <= len(REDUCE_OPS):
        details.append(REDUCE_OPS[reduce_op - 1])
    if root >= 0:
        details.append(f"root {root}")
    if 0 < num_splits <= _MAX_SPLITS:
        details.append(f"splits {numbers[_MAX_DIMS : _MAX_DIMS + num_splits]}")
    elif num_splits:
        details.append(f"{num_splits} splits, checksum {checksum:08x}")
    text = OPERATIONS[kind] if kind < len(OPERATIONS) else f"operation {kind}"
    text += f"({', '.join(details)})" if details else ""
    if _text(dtype):
        text += f" {_text(dtype)}[{_dims(numbers[:_MAX_DIMS], num_dims)}]"
    return text if _text(device) in ("", "cpu") else f"{text} on {_text(device)}"


def _dims(dims: list[int], num_dims: int) -> str:
    if num_dims == _MANY_DIMS:
        return f"{dims[0]} elements"
    return ", ".join("*" if dim == _ANY else str(dim) for dim in dims[:num_dims])


def _text(raw: bytes) -> str:
    return raw.rstrip(b"\0").decode("ascii", "replace")
