"""Classify a thread's activity from its stack.

The frames called from the innermost line of user code show what that line is doing. All other
frames are considered only if they belong to a library phase that can call user code: data loading,
checkpointing or compilation. C frames are used if user code calls C++ directly, for example in
`work.wait()` or a store's `get`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from echelon.analysis.activity.c_stack import main_frames, read_c_stack
from echelon.analysis.activity.doing import Activity, Doing
from echelon.analysis.activity.tables import CALLED, IMPORTS, PHASES, WAITS, Row, match
from echelon.analysis.evidence.stacks.frames import Frame, main_thread, users_frame

_MAX_FRAMES = 400


@lru_cache(maxsize=4096)  # several rules ask about each rank
def read_activity(stacks: str, native: str = "") -> Activity:
    """Return the main thread's activity.

    Args:
        stacks: the Python stacks of all threads, in faulthandler's format.
        native: the C frames, captured at the same moment; see `HostFacts.native_stacks`.
    """
    thread = main_thread(stacks)
    return read_frames(thread.frames if thread else (), main_frames(native))


def read_frames(frames: tuple[Frame, ...], c_frames: tuple[str, ...] = ()) -> Activity:
    """Classify a thread's activity from its frames, which are ordered innermost first."""
    frames = frames[:_MAX_FRAMES]
    seen = read_c_stack(c_frames)
    line = users_frame(frames)
    if not frames:
        doing, by = seen or (Doing.UNKNOWN, "")
        return Activity(doing=doing, by=by)
    own = next((place for place, one in enumerate(frames) if one.is_users), len(frames))
    called = _first(frames[:own], CALLED)
    phase = _phase(frames)
    if called is not None and phase is not None and _is_below(phase[1], called[1], frames):
        called = None  # a collectives library that compiles or reads a file
    if called is not None and called[0] is not Doing.BACKWARD:
        return Activity(doing=called[0], line=line, by=str(called[1]))
    if seen is not None and seen[0] in (Doing.COLLECTIVE, Doing.STORE, Doing.DEVICE):
        return Activity(doing=seen[0], line=line, by=seen[1])
    if phase is not None:
        nested = own < frames.index(phase[1])
        return Activity(doing=phase[0], line=line, by=str(phase[1]), is_nested=nested)
    if called is not None:
        return Activity(doing=called[0], line=line, by=str(called[1]))
    importer = _first(frames, ((Doing.IMPORTING, IMPORTS),))
    if importer is not None and line is not None and line.function == "<module>":
        return Activity(doing=Doing.IMPORTING, line=line, by=str(importer[1]))
    waits = _first(frames[:own], WAITS)
    if waits is not None:
        return Activity(doing=waits[0], line=line, by=str(waits[1]))
    if seen is not None:
        return Activity(doing=seen[0], line=line, by=seen[1])
    doing = Doing.USER if own < len(frames) else Doing.LIBRARY
    return Activity(doing=doing, line=line, by=str(frames[0]))


def _is_below(one: Frame, other: Frame, frames: tuple[Frame, ...]) -> bool:
    return frames.index(one) < frames.index(other)


def _phase(frames: tuple[Frame, ...]) -> tuple[Doing, Frame] | None:
    for doing, rows in PHASES:
        found = _first(frames, ((doing, rows),))
        if found is not None:
            return found
    return None


def _first(
    frames: Sequence[Frame], tables: Sequence[tuple[Doing, tuple[Row, ...]]]
) -> tuple[Doing, Frame] | None:
    """Return (activity, frame) for the innermost frame that matches a row of any table, or None."""
    for frame in frames:
        path = frame.file[-1024:].replace("\\", "/")
        for doing, rows in tables:
            if match(rows, path, frame.function):
                return doing, frame
    return None
