"""One collective as a backend gets it: checked, with flat views in place of the caller's arrays."""

from __future__ import annotations

from dataclasses import dataclass

from echelon.dist.arrays import Flat

OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "barrier")
REDUCE_OPS = ("sum", "avg", "min", "max", "prod", "band", "bor", "bxor")


@dataclass(frozen=True, slots=True)
class Operation:
    """A collective of one group.

    Attributes:
        kind: one of `OPERATIONS`.
        sequence: its number in the group, from 0.
        dtype: the data's true dtype ("bfloat16" travels as uint16); "" for a barrier.
        reduce_op: one of `REDUCE_OPS`, "" if it does not reduce.
        root: group rank, -1 if it has none.
        source, target: [numel] each; the same array for the operations in place, None for a
            barrier. all_gather: target is [group_size * n]; reduce_scatter: source is.
        signature: what the caller passed, for the error of a mismatch.
    """

    kind: str
    sequence: int
    dtype: str = ""
    reduce_op: str = ""
    root: int = -1
    source: Flat | None = None
    target: Flat | None = None
    signature: str = ""
    timeout_s: float = 0.0

    def __str__(self) -> str:
        """Show what was called: `all_reduce(sum) float32[3, 4]`."""
        details = [text for text in (self.reduce_op,) if text]
        if self.root >= 0:
            details.append(f"root {self.root}")
        called = self.kind + (f"({', '.join(details)})" if details else "")
        return f"{called} {self.signature}".rstrip()
