"""Determine from a thread's C frames what the thread is waiting for.

The innermost function is certain. Its callers, marked with `?`, come from a scan of the stack's
memory, so they can be left over from earlier calls (see `host/native_stacks.py`). Therefore only
the few frames nearest the innermost function are used.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable

from echelon.analysis.activity.doing import Doing
from echelon.analysis.activity.tables import (
    C_CONDITION,
    C_NCCL,
    C_POLL,
    C_TAKES_LOCK,
    C_TORCH,
    C_WAITS,
    C_WORK,
)
from echelon.recorder.format.schema import HostThread

_NEAR, _FAR = 4, 10
_GLOO = re.compile(r"\d+ pt_gloo_runloop")


def main_frames(native: str) -> tuple[str, ...]:
    """Return the main thread's C frames, innermost first, without the `?` marks."""
    lines = native.splitlines()
    below = itertools.takewhile(lambda line: line[:1] == " ", lines[1:])
    return tuple(line.strip().removeprefix("? ") for line in below)


def read_c_stack(frames: tuple[str, ...]) -> tuple[Doing, str] | None:
    """Return a thread's activity and the C function that indicates it, or None if unknown."""
    near = frames[:_NEAR]
    waits_in_torch = any(map(C_CONDITION.search, near[:2])) and any(map(C_TORCH.search, near))
    if waits_in_torch:
        work = next((one for one in frames[:_FAR] if C_WORK.search(one)), "")
        return (Doing.COLLECTIVE, "c10d::Work::wait") if work else None
    nccl = next((one for one in near if C_NCCL.search(one)), "")
    if nccl:
        return Doing.DEVICE, nccl.partition(" ")[0]
    if near and C_POLL.search(near[0]) and len(near) > 1 and C_TORCH.search(near[1]):
        return Doing.STORE, "poll, called by torch's C++"  # only its store's client polls there
    for frame in near:
        for doing, pattern in C_WAITS:
            if pattern.search(frame):
                return doing, frame.partition(" ")[0]
    return None


def waits_in_torch(native: str) -> bool:
    """Return whether the main thread is waiting for another thread inside torch's C++ code."""
    near = main_frames(native)[:_NEAR]
    return any(map(C_CONDITION.search, near[:2])) and any(map(C_TORCH.search, near))


def num_inside(threads: Iterable[HostThread], native: str) -> int:
    """Count the Gloo threads that are waiting for peers in a collective."""
    waiting = sum(thread.is_in_collective for thread in threads)
    return max(0, waiting - _num_taking_lock(native)) if waiting else 0


def _num_taking_lock(native: str) -> int:
    stacks = re.split(r"^Thread ", native, flags=re.MULTILINE)
    near = [stack.splitlines()[1 : 1 + _FAR] for stack in stacks if _GLOO.match(stack)]
    return sum(any(map(C_TAKES_LOCK.search, lines)) for lines in near)
