"""Where in the user's code an operation was called: "file:line function", and a short stack.

A frame belongs to the user unless its file lies in this package, in the standard library or in an
installed package. Frames are met again and again, so the text is made once per (code, instruction)
chain and the lookup is a dictionary's.
"""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path
from types import CodeType, FrameType

_PACKAGE = str(Path(__file__).resolve().parents[1]) + "/"
_LIBRARIES = tuple(
    {
        path.rstrip("/") + "/"
        for name in ("stdlib", "platstdlib", "purelib", "platlib")
        if (path := sysconfig.get_path(name))
    }
)
_STACK_FRAMES = 4
_MAX_WALK = 64

_user_code: dict[CodeType, bool] = {}


def user_frame(frame: FrameType | None) -> FrameType | None:
    """Return the nearest frame of the user's code at or above `frame`."""
    nearest = frame
    for _ in range(_MAX_WALK):
        if frame is None:
            return nearest
        if is_user_code(frame.f_code):
            return frame
        frame = frame.f_back
    return nearest


def is_user_code(code: CodeType) -> bool:
    """Tell whether a code object comes from the user's own files."""
    known = _user_code.get(code)
    if known is None:
        known = _user_code[code] = is_user_file(code.co_filename)
    return known


def is_user_file(filename: str) -> bool:
    """Tell whether a source file is the user's own."""
    if filename.startswith("<"):  # "<frozen importlib>"; "<stdin>" and "<string>" are the user's
        return not filename.startswith("<frozen")
    return not filename.startswith(_PACKAGE) and not filename.startswith(_LIBRARIES)


def chain(frame: FrameType) -> tuple[object, ...]:
    """Return a key that is equal for two calls made from the same place."""
    key: list[object] = []
    here: FrameType | None = frame
    for _ in range(_STACK_FRAMES):
        if here is None:
            break
        key.append(here.f_code)
        key.append(here.f_lasti)
        here = here.f_back
    return tuple(key)


def describe(frame: FrameType) -> str:
    """Say where a frame stands: "file:line function"."""
    return f"{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_name}"


def stack(frame: FrameType) -> str:
    """Describe a frame and its callers, innermost first, one a line."""
    lines = []
    here: FrameType | None = frame
    for _ in range(_STACK_FRAMES):
        if here is None:
            break
        lines.append(describe(here))
        here = here.f_back
    return "\n".join(lines)


def caller(depth: int = 1) -> FrameType | None:
    """Return the nearest user frame, starting `depth` frames above the caller of this."""
    return user_frame(sys._getframe(depth + 1))
