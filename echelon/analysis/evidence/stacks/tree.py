"""Merge the stacks of all ranks into one tree that shows how many ranks are at each position.

Each tree node contains consecutive frames that the same set of ranks has in common. The short
form of a stack contains only the frames of user code and the first call into a library, so that the
exact position inside the library does not matter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from echelon.analysis.evidence.stacks.frames import Frame, file_name, users_frame

MAX_FRAMES = 100  # innermost frames that are kept; the limit of faulthandler's output for a thread
_Stacks = Sequence[tuple[tuple[str, ...], tuple[int, ...]]]


@dataclass(frozen=True, slots=True)
class Branch:
    """A sequence of frames common to some ranks, outermost first, and the branches below it."""

    frames: tuple[str, ...]
    ranks: tuple[int, ...]
    children: tuple[Branch, ...] = ()


def merge(stacks: Mapping[int, tuple[str, ...]]) -> tuple[Branch, ...]:
    """Merge stacks into a tree, with the largest branch first. Empty stacks are ignored.

    Each stack lists its outermost frame first.
    """
    alike: dict[tuple[str, ...], list[int]] = {}
    for rank, frames in stacks.items():
        if frames:
            alike.setdefault(frames[-MAX_FRAMES:], []).append(rank)
    return _fork([(frames, tuple(sorted(ranks))) for frames, ranks in alike.items()], 0)


def _fork(stacks: _Stacks, depth: int) -> tuple[Branch, ...]:
    """Return one branch for each distinct frame at `depth`."""
    ways: dict[str, list[tuple[tuple[str, ...], tuple[int, ...]]]] = {}
    for one in stacks:
        if len(one[0]) > depth:
            ways.setdefault(one[0][depth], []).append(one)
    branches = [_branch(way, depth) for way in ways.values()]
    return tuple(sorted(branches, key=lambda one: (-len(one.ranks), one.ranks)))


def _branch(way: _Stacks, depth: int) -> Branch:
    shortest = min((frames for frames, _ in way), key=len)
    end = depth + 1
    while end < len(shortest) and all(frames[end] == shortest[end] for frames, _ in way):
        end += 1
    ranks = tuple(sorted(rank for _, some in way for rank in some))
    return Branch(shortest[depth:end], ranks, _fork(way, end))


@lru_cache(maxsize=4096)
def short_form(frames: tuple[Frame, ...]) -> tuple[str, ...]:
    """Return a stack's user frames, outermost first, and the library function that they call.

    Args:
        frames: the frames of the stack, innermost first.
    """
    own = [place for place, frame in enumerate(frames) if frame.is_users]
    if not own:
        at = users_frame(frames)
        return () if at is None else (str(at),)
    shown = [str(frames[place]) for place in reversed(own)]
    if own[0] > 0:
        shown.append(f"{frames[own[0] - 1].function}()")
    return tuple(shown)


def long_form(frames: tuple[Frame, ...]) -> tuple[str, ...]:
    """Return all frames of a stack, outermost first, without line numbers for library frames.

    Args:
        frames: the frames of the stack, innermost first.
    """
    return tuple(
        str(frame) if frame.is_users else f"{file_name(frame.file)} in {frame.function}"
        for frame in reversed(frames)
    )
