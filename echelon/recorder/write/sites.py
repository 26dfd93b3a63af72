"""Describe the call site of an operation in the user's code, with a short stack.

A call site is described as "file:line function". A frame belongs to the user unless its file is
part of echelon, of the standard library or of an installed package. Descriptions are cached.
"""

from __future__ import annotations

import sys
import sysconfig
import threading
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType

from echelon.recorder.format.schema import SITES_BYTES
from echelon.recorder.write.ring.texts import Texts

_PACKAGE = str(Path(__file__).resolve().parents[2]) + "/"
_LIBRARIES = tuple(
    {
        path.rstrip("/") + "/"
        for name in ("stdlib", "platstdlib", "purelib", "platlib")
        if (path := sysconfig.get_path(name))
    }
)
# Packages of a second environment: of the system, of the user's home, or from PYTHONPATH.
_INSTALLED = ("/site-packages/", "/dist-packages/")
# Code that torch's compilers write and run: its callers belong to the user.
_GENERATED = ("<eval_with_key>", "<frozen", "<torch_package")
_GENERATED_FOLDER = "/torchinductor_"
_STACK_FRAMES = 4
_MAX_WALK = 64

_MAX_CODES = 1 << 16
_MAX_SITES = 1 << 14

# By identity, since hashing a code object costs as much as everything else. `_codes` keeps the
# objects alive, so that no identity is used twice; if a program generates code without end, it is
# classified again.
_user_codes: set[int] = set()
_other_codes: set[int] = set()
_codes: list[CodeType] = []


def user_frame(frame: FrameType | None) -> FrameType | None:
    """Return the nearest frame of user code, searching outwards from `frame`.

    If the thread has no frame of user code, return `frame` itself or, on a thread started by C++
    (such as an autograd thread), the nearest user frame of the main thread.
    """
    nearest = last = frame
    for _ in range(_MAX_WALK):
        if frame is None:
            return _on_main_thread() or nearest if _is_outside_python(last) else nearest
        code = frame.f_code
        if id(code) in _user_codes or (id(code) not in _other_codes and is_user_code(code)):
            return frame
        last, frame = frame, frame.f_back
    return nearest


def _is_outside_python(outermost: FrameType | None) -> bool:
    """Return whether the thread with this outermost frame was started outside `threading`."""
    return outermost is not None and outermost.f_code.co_filename != threading.__file__


def _on_main_thread() -> FrameType | None:
    main = threading.main_thread().ident
    if main is None or main == threading.get_ident():
        return None
    frame = sys._current_frames().get(main)
    while frame is not None and not is_user_code(frame.f_code):
        frame = frame.f_back
    return frame


def is_user_code(code: CodeType) -> bool:
    """Return whether a code object comes from one of the user's own files."""
    if id(code) in _user_codes:
        return True
    if id(code) in _other_codes:
        return False
    own = is_user_file(code.co_filename)
    if len(_codes) < _MAX_CODES:
        _codes.append(code)
        (_user_codes if own else _other_codes).add(id(code))
    return own


def is_user_file(filename: str) -> bool:
    """Return whether a source file is the user's own: neither echelon's nor a library's."""
    if filename.startswith("<"):  # "<frozen importlib>"; "<stdin>" and "<string>" are the user's
        return not filename.startswith(_GENERATED)
    return (
        _GENERATED_FOLDER not in filename
        and not filename.startswith(_PACKAGE)
        and not filename.startswith(_LIBRARIES)
        and not any(folder in filename for folder in _INSTALLED)
    )


def describe(frame: FrameType) -> str:
    """Return the position of a frame as "file:line function"."""
    return f"{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_name}"


def stack(frame: FrameType) -> str:
    """Return the positions of a frame and of up to three of its callers, one per line.

    The innermost frame comes first.
    """
    return "\n".join(describe(one) for one in _frames(frame))


class Sites:
    """A cache of call sites, each stored as references into the string table."""

    def __init__(self, texts: Texts) -> None:
        self._texts = texts
        self._known: dict[tuple[int, ...], tuple[tuple[int, int], list[CodeType]]] = {}

    def find(self, frame: FrameType | None) -> tuple[int, int]:
        """Return references to the description and the stack of the nearest user frame."""
        first = frame if frame and id(frame.f_code) in _user_codes else user_frame(frame)
        if first is None:
            return 0, 0
        key: tuple[int, ...]
        second = first.f_back
        if second is None:
            key = (id(first.f_code), first.f_lasti)
        elif (third := second.f_back) is None:
            key = (id(first.f_code), first.f_lasti, id(second.f_code), second.f_lasti)
        elif (fourth := third.f_back) is None:
            key = (
                id(first.f_code), first.f_lasti,
                id(second.f_code), second.f_lasti,
                id(third.f_code), third.f_lasti,
            )  # fmt: skip
        else:
            key = (
                id(first.f_code), first.f_lasti,
                id(second.f_code), second.f_lasti,
                id(third.f_code), third.f_lasti,
                id(fourth.f_code), fourth.f_lasti,
            )  # fmt: skip
        known = self._known.get(key)
        return known[0] if known is not None else self._add(key, first)

    def add(self, frame: FrameType) -> tuple[int, int]:
        """Store the description and the stack of a user frame; return references to them."""
        intern = self._texts.intern
        return intern(describe(frame), SITES_BYTES), intern(stack(frame), SITES_BYTES)

    def _add(self, key: tuple[int, ...], frame: FrameType) -> tuple[int, int]:
        refs = self.add(frame)
        if len(self._known) < _MAX_SITES:
            self._known[key] = refs, [one.f_code for one in _frames(frame)]
        return refs


def _frames(frame: FrameType) -> Iterator[FrameType]:
    here: FrameType | None = frame
    for _ in range(_STACK_FRAMES):
        if here is None:
            return
        yield here
        here = here.f_back


def caller(depth: int = 1) -> FrameType | None:
    """Return the nearest user frame, starting `depth` frames above this function's caller."""
    return user_frame(sys._getframe(depth + 1))
