"""Define calls with their arguments, and the tables that all ranks' records refer to.

[Note: exact calls and comparable calls] Even in a correct collective, two ranks can pass different
arguments. For example, the output splits of an all_to_all are the transpose of its input splits.
Therefore each row contains the exact call, and `Tables.comparable` maps a call to the part that
must be equal on all members. The vote on what each member called uses comparable calls. Reports
show exact calls.
"""

from __future__ import annotations

from typing import NamedTuple

from echelon.recorder.format.schema import Signature

TRANSPOSED = frozenset({"all_to_all", "alltoall", "all_to_all_single", "all_to_allv"})


NO_VOTE = object()  # in place of a comparable call: this one takes no part in the vote


class Call(NamedTuple):
    """A call with its arguments."""

    operation: str
    signature: Signature
    reduce_op: str = ""
    root: int = -1

    def __str__(self) -> str:
        """Format the call, for example as `all_reduce(float32[1024], sum)`."""
        parts = [str(self.signature)] if str(self.signature) else []
        parts += [self.reduce_op] if self.reduce_op else []
        parts += [f"root={self.root}"] if self.root >= 0 else []
        return f"{self.operation}({', '.join(parts)})"


class Tables:
    """The tables of calls and strings (sites, stacks, errors), common to all ranks."""

    def __init__(self) -> None:
        self.texts: list[str] = [""]
        self.calls: list[Call] = []
        self.comparable: list[int] = []  # call -> number of its comparable form
        self._text_index: dict[str, int] = {"": 0}
        self._call_index: dict[tuple[Call, object], int] = {}
        self._comparable_index: dict[object, int] = {}

    def text(self, text: str) -> int:
        """Return the index of a string, adding the string if it is new."""
        known = self._text_index.get(text)
        if known is None:
            known = self._text_index[text] = len(self.texts)
            self.texts.append(text)
        return known

    def call(self, call: Call, comparable: object = None) -> int:
        """Return the index of a call in `calls`, adding the call if it is new.

        Args:
            comparable: the fields that must be equal on all members. None means that the rules for
                echelon's own calls apply; NO_VOTE means that the call cannot be compared.
        """
        key = (call, comparable)
        known = self._call_index.get(key)
        if known is None:
            known = self._call_index[key] = len(self.calls)
            self.calls.append(call)
            self.comparable.append(self._comparable(call, comparable))
        return known

    def _comparable(self, call: Call, comparable: object) -> int:
        if comparable is NO_VOTE:
            return -1
        key = comparable_call(call) if comparable is None else comparable
        return self._comparable_index.setdefault(key, len(self._comparable_index))


def comparable_call(call: Call) -> object:
    """Return the fields of a collective call on which all members must agree.

    See [Note: exact calls and comparable calls].
    """
    operation, signature = call.operation, call.signature
    if operation in TRANSPOSED:
        return (operation, signature.dtype, call.root)
    return call
