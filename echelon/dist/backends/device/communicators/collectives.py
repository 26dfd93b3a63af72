"""Build a group's collectives from the operations that a library provides.

gather, scatter and all_to_all consist of sends and receives that are launched together. A sum in
rank order is computed by exchanging the ranks' data and then reducing it with torch.
"""

from __future__ import annotations

from typing import Any

from echelon.dist.backends.device.library import Communicator, DeviceLibrary
from echelon.dist.operation.operation import REDUCING, Operation

_WIDE = ("float16", "bfloat16")
_ON_BOOL = {"bor": "max", "max": "max", "band": "min", "min": "min"}


def refuses(library: DeviceLibrary, kind: str, dtype: str, reduce_op: str) -> str:
    """Return the reason the library cannot run this kind of operation, or "" if it can.

    Bool arrays are reduced as bytes; "or" is computed as a maximum, and "and" as a minimum.
    """
    del kind  # bytes can always be moved
    if not reduce_op:
        return ""
    if dtype == "bool":
        return "" if reduce_op in _ON_BOOL else f"has no {reduce_op} of bool"
    if reduce_op not in library.reduce_ops:
        return f"has no {reduce_op}"
    return "" if dtype in library.dtypes else f"has no sums of {dtype}"


class Collectives:
    """The collectives of one group on a device.

    Callers must hold the communicator (see `Handle.entered`).
    """

    def __init__(
        self, library: DeviceLibrary, size: int, rank: int, *, is_rank_ordered: bool
    ) -> None:
        self._library = library
        self._torch = library.torch
        self._size = size
        self._rank = rank
        self._is_rank_ordered = is_rank_ordered

    def launch(
        self, on: Communicator, operation: Operation, source: Any, target: Any, stream: Any
    ) -> None:
        """Queue one collective.

        Args:
            on: the group's communicator.
            operation: the user's operation.
            source, target: the operation's arrays, as flat tensors.
            stream: the stream on which to queue the operation. The communicator's device must be
                the current device.
        """
        if max(0 if one is None else one.numel() for one in (source, target)) == 0:
            return  # all members know, since their shapes are equal
        if operation.kind == "all_gather" and operation.output_splits:
            self._gather_uneven(on, operation, source, target, stream)
            return
        if operation.kind not in REDUCING:
            self._move(on, operation, self._bytes(source), self._bytes(target), stream)
            return
        op = operation.reduce_op
        if operation.dtype == "bool":
            source, target, op = self._bytes(source), self._bytes(target), _ON_BOOL[op]
        is_uneven = bool(operation.input_splits)
        if is_uneven or (self._is_rank_ordered and operation.dtype != "bool"):  # bytes do not round
            self._reduce_in_order(on, operation, source, target, op, stream)
        else:
            on.launch(operation.kind, source, target, op, operation.root, stream)

    def _move(
        self, on: Communicator, operation: Operation, source: Any, target: Any, stream: Any
    ) -> None:
        """Launch an operation that moves bytes without interpreting them."""
        root = operation.root
        if operation.kind == "all_to_all":
            width = source.numel() // max(1, sum(operation.input_splits)) or (
                target.numel() // max(1, sum(operation.output_splits))
            )
            self._exchange(
                on,
                source.split([count * width for count in operation.input_splits]),
                target.split([count * width for count in operation.output_splits]),
                stream,
            )
        elif operation.kind == "gather":
            parts = None if target is None else target.chunk(self._size)
            self._to_root(on, root, source, parts, stream)
        elif operation.kind == "scatter":
            parts = None if source is None else source.chunk(self._size)
            self._from_root(on, root, parts, target, stream)
        elif operation.kind == "broadcast":
            data = source if target is None else target
            on.launch("broadcast", data, data, "", root, stream)
        else:
            on.launch(operation.kind, source, target, "", root, stream)

    def _gather_uneven(
        self, on: Communicator, operation: Operation, source: Any, target: Any, stream: Any
    ) -> None:
        outgoing = [self._bytes(source)] * self._size
        parts = target.split(list(operation.output_splits))
        self._exchange(on, outgoing, [self._bytes(part) for part in parts], stream)

    def _exchange(self, on: Communicator, outgoing: Any, incoming: Any, stream: Any) -> None:
        mine = self._rank
        with self._library.group():
            for rank in range(self._size):
                if rank == mine:
                    continue
                if outgoing[rank].numel():
                    on.launch("send", outgoing[rank], None, "", rank, stream)
                if incoming[rank].numel():
                    on.launch("recv", None, incoming[rank], "", rank, stream)
        self._library.run(stream, lambda: incoming[mine].copy_(outgoing[mine]))

    def _to_root(self, on: Communicator, root: int, source: Any, parts: Any, stream: Any) -> None:
        if parts is None:
            on.launch("send", source, None, "", root, stream)
            return
        with self._library.group():
            for rank in range(self._size):
                if rank != root:
                    on.launch("recv", None, parts[rank], "", rank, stream)
        self._library.run(stream, lambda: parts[root].copy_(source))

    def _from_root(self, on: Communicator, root: int, parts: Any, target: Any, stream: Any) -> None:
        if parts is None:
            on.launch("recv", None, target, "", root, stream)
            return
        with self._library.group():
            for rank in range(self._size):
                if rank != root:
                    on.launch("send", parts[rank], None, "", rank, stream)
        self._library.run(stream, lambda: target.copy_(parts[root]))

    def _reduce_in_order(
        self, on: Communicator, operation: Operation, source: Any, target: Any, op: str, stream: Any
    ) -> None:
        """Exchange all ranks' data and reduce it in rank order; sum 16-bit floats in float32."""
        empty = self._library.empty_like
        if operation.kind == "all_reduce":
            self._all_reduce_in_order(on, operation, source, target, op, stream)
            return
        if operation.kind == "reduce_scatter":
            parts = empty(source, self._size * target.numel(), stream)
            splits = operation.input_splits or (target.numel(),) * self._size
            outgoing = [self._bytes(part) for part in source.split(list(splits))]
            incoming = [self._bytes(part) for part in parts.split([target.numel()] * self._size)]
            self._exchange(on, outgoing, incoming, stream)
        else:
            parts = empty(source, self._size * source.numel(), stream)
            on.launch("all_gather", self._bytes(source), self._bytes(parts), "", 0, stream)
        if target is not None:
            rows = parts.view(self._size, -1)
            self._library.run(
                stream, lambda: target.copy_(self._reduced(rows, operation.dtype, op))
            )

    def _all_reduce_in_order(
        self, on: Communicator, operation: Operation, source: Any, target: Any, op: str, stream: Any
    ) -> None:
        """Reduce one shard of the elements on each rank, and then all-gather the shards.

        This needs memory for one additional copy of the data.
        """
        pieces = source.tensor_split(self._size)
        results = target.tensor_split(self._size)
        mine, own = pieces[self._rank], results[self._rank]
        rows = self._library.empty_like(source, self._size * mine.numel(), stream)
        rows = rows.view(self._size, mine.numel())
        outgoing = [self._bytes(piece) for piece in pieces]
        self._exchange(on, outgoing, [self._bytes(row) for row in rows], stream)
        if own.numel():
            self._library.run(stream, lambda: own.copy_(self._reduced(rows, operation.dtype, op)))
        incoming = [self._bytes(result) for result in results]
        self._exchange(on, [self._bytes(own)] * self._size, incoming, stream)

    def _reduced(self, rows: Any, dtype: str, op: str) -> Any:
        total = rows[0].float() if dtype in _WIDE else rows[0].clone()
        combine = {
            "sum": self._torch.add, "avg": self._torch.add, "prod": self._torch.mul,
            "min": self._torch.minimum, "max": self._torch.maximum,
        }[op]  # fmt: skip
        for row in rows[1:]:
            combine(total, row.to(total.dtype), out=total)
        if op == "avg":  # by an array: CUDA multiplies with a number's inverse
            total.div_(total.new_full((1,), self._size))
        return total

    def _bytes(self, tensor: Any) -> Any:
        return None if tensor is None else tensor.view(self._torch.uint8)
