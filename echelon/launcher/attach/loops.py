"""Find ranks that have left a loop while other ranks are still inside it.

A rank that runs out of batches leaves the batch loop before the other ranks do. The ranks' stacks
then differ in one function: one rank is inside the loop, and another is at a later line. The loop
is found by parsing the source file, which is never executed.
"""

from __future__ import annotations

import ast
import os
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache

from echelon.analysis.evidence.stacks.frames import Frame, file_name

_MAX_SOURCE_BYTES = 2 << 20
Read = Callable[[int, str], str]  # from a rank and a path to the source, "" if it is not known


@dataclass(frozen=True, slots=True)
class Left:
    """A rank that has left a loop, and another rank that is still inside it."""

    rank: int
    behind: Frame
    other: int
    within: Frame
    first_line: int  # of the loop

    @property
    def loop(self) -> str:
        """The file name and first line number of the loop, such as "train.py:14"."""
        return f"{file_name(self.within.file)}:{self.first_line}"


def find_left(stacks: Mapping[int, tuple[Frame, ...]], read: Read) -> tuple[Left, ...]:
    """Return each rank that has left a loop, paired with a rank that is still inside that loop.

    Args:
        stacks: the frames of each rank's main thread, innermost first, keyed by rank.
        read: a function that returns the source of a file as seen by a rank.
    """
    found: list[Left] = []
    for rank, frames in stacks.items():
        pairs = ((other, _parting(frames, theirs)) for other, theirs in stacks.items())
        for other, parting in pairs:
            first_line = _loop_left(*parting, read(other, parting[1].file)) if parting else 0
            if parting and first_line:
                found.append(Left(rank, parting[0], other, parting[1], first_line))
                break
    return tuple(found)


def _parting(one: tuple[Frame, ...], other: tuple[Frame, ...]) -> tuple[Frame, Frame] | None:
    """Return the outermost pair of frames at which two stacks differ.

    Return None unless both frames are in the same function and the frame from `one` is at the
    later line.
    """
    for mine, theirs in zip(reversed(one), reversed(other), strict=False):
        if mine != theirs:
            is_same = (mine.file, mine.function) == (theirs.file, theirs.function)
            return (mine, theirs) if is_same and mine.line > theirs.line else None
    return None


def _loop_left(behind: Frame, within: Frame, source: str) -> int:
    """Return the first line number of the loop that `behind` has left.

    This is the innermost loop that contains `within` but ends before `behind`. Return 0 if there
    is no such loop.
    """
    tree = _parsed(source)
    scope = None if tree is None else _scope(tree, within)
    if tree is None or scope is None or _scope(tree, behind) is not scope:
        return 0
    loops = [
        (node.lineno, node.end_lineno or 0)
        for node in ast.walk(scope)
        if isinstance(node, (ast.For, ast.AsyncFor, ast.While))
    ]
    left = [first for first, last in loops if first <= within.line <= last < behind.line]
    return max(left, default=0)


@lru_cache(maxsize=8)  # many pairs of ranks diverge in the same file
def _parsed(source: str) -> ast.Module | None:
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _scope(tree: ast.Module, frame: Frame) -> ast.AST | None:
    """Return the function that a frame was executing, or the module for a module-level frame.

    Return None if the source file no longer matches the frame.
    """
    functions = [
        node
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        and node.lineno <= frame.line <= (node.end_lineno or 0)
    ]
    if not functions:
        return tree if frame.function == "<module>" else None
    innermost = max(functions, key=lambda node: node.lineno)
    return innermost if innermost.name == frame.function else None


def source_of(pid: int, path: str) -> str:
    """Return a source file's text, as a process sees it; "" if unreadable or too long."""
    below = f"/proc/{pid}/root{path}" if path.startswith("/") else f"/proc/{pid}/cwd/{path}"
    try:
        file = os.open(below, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError):
        return ""
    try:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode) or status.st_size > _MAX_SOURCE_BYTES:
            return ""
        return os.read(file, _MAX_SOURCE_BYTES).decode("utf-8", "replace")
    except OSError:
        return ""
    finally:
        os.close(file)
