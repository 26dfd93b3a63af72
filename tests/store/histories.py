"""Histories of calls on a store's keys, and whether one order of them explains every result.

An operation takes effect at one moment between its call and its return (linearizability, Herlihy
and Wing 1990); one whose connection broke takes effect at some later moment, or never. Keys are
independent, so each is checked by itself: a search over which operation came next (Wing and Gong
1993) that remembers what it has tried.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

State = bytes | None


@dataclass(frozen=True)
class Operation:
    """One call on one key.

    Attributes:
        result: what it returned; None too for a call that broke.
        began, ended: monotonic times; infinite if it broke and may still take effect.
    """

    kind: str
    operands: tuple[bytes, ...]
    result: object
    began: float
    ended: float = math.inf

    @property
    def is_known(self) -> bool:
        return self.ended < math.inf


def apply(operation: Operation, state: State) -> tuple[object, State]:
    """Return what the operation returns in a state, and the state that it leaves."""
    if operation.kind == "set":
        return None, operation.operands[0]
    if operation.kind == "get":
        return state, state
    if operation.kind == "delete":
        return state is not None, None
    if operation.kind == "add":
        total = int(state or b"0") + int(operation.operands[0])
        return total, b"%d" % total
    assert operation.kind == "compare_set"
    expected, desired = operation.operands
    if state == expected or (state is None and not expected):
        return desired, desired
    return (expected if state is None else state), state


def is_linearizable(operations: list[Operation], state: State = None) -> bool:
    """Whether some order of the operations explains every result that is known."""
    everything = sum(1 << i for i, one in enumerate(operations) if one.is_known)
    tried: set[tuple[int, State]] = set()
    stack: list[tuple[int, State]] = [(0, state)]
    while stack:
        done, held = stack.pop()
        if done & everything == everything:
            return True
        if (done, held) in tried:
            continue
        tried.add((done, held))
        left = [(i, one) for i, one in enumerate(operations) if not done >> i & 1]
        first_end = min(one.ended for _, one in left)
        for i, one in left:
            if one.began > first_end:
                continue
            result, after = apply(one, held)
            if not one.is_known or result == one.result:
                stack.append((done | 1 << i, after))
    return False
