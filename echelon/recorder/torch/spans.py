"""Record phases of a torch program as spans: waits for data or the store, checkpoints, compilation.

The program's own marks take precedence: the hooks do not record spans with a name that the program
itself has passed to `echelon.span`.

[Note: the end of a loader's iteration] With uneven batches, one rank's loop over a loader can end
before the loops of the other ranks. An iteration ends with its last batch, or when the program
drops the iterator. Python can free the iterator at any point, even within the recorder. Therefore,
the end is recorded only at the program's next batch or operation, as the mark `data_end`.
"""

from __future__ import annotations

import functools
import os
import sys
import weakref
from collections import deque
from collections.abc import Callable
from time import monotonic_ns
from types import ModuleType
from typing import Any, NamedTuple

import echelon.recorder.current as black_box
from echelon.recorder import marks
from echelon.recorder.spent import spent
from echelon.recorder.torch.guarding import quietly, replace

_DETAIL_CHARS = 200
_END = "_echelon_end"  # attribute of a loader's iterator: notes that it has ended
ended_loaders: deque[int] = deque(maxlen=64)  # iterations that ended and have no mark yet


class _Opened(NamedTuple):
    span: Any
    name: str
    detail: str
    totals: dict[str, int]  # of the thread that opened it
    before_ns: int
    began_ns: int


def opened(name: str, detail: str = "") -> _Opened | None:
    """Open a span; return a handle to pass to `closed`, or None if the span is not recorded."""
    recorder = black_box.if_opened()
    if recorder is None or name in marks.by_hand:
        return None
    span, totals = recorder.open_span(name, detail, 2), spent.spans_ns
    return _Opened(span, name, detail, totals, totals.get(name, 0), monotonic_ns())


def closed(one: _Opened | None, *, failed: bool = False) -> None:
    """Close a span that `opened` returned.

    If `failed` is True, a checkpoint span does not count as the save or load of a checkpoint.
    """
    recorder = black_box.if_opened()
    if one is None or recorder is None:
        return
    # Not a sum: a span of the same name inside this one has ended, and is part of it.
    one.totals[one.name] = one.before_ns + monotonic_ns() - one.began_ns
    recorder.close_span(one.span)
    if one.name == "checkpoint" and not failed:
        recorder.note_checkpoint(one.detail)


def in_span(name: str, detail: Callable[..., str]) -> Callable[[Any], Any]:
    """Return a decorator that runs a function inside a span.

    Args:
        detail: a function that computes the span's detail from the decorated function's arguments.
    """

    def wrap(original: Any) -> Any:
        @functools.wraps(original)
        def call(*args: Any, **named: Any) -> Any:
            span = opened(name, quietly(detail, *args) or "")
            try:
                result = original(*args, **named)
            except BaseException:
                closed(span, failed=True)
                raise
            closed(span)
            return result

        return call

    return wrap


def mark_loaders(torch: Any) -> None:
    """Record every wait for a loader's next batch as a span; mark when a loader is exhausted."""
    iterator = torch.utils.data.dataloader._BaseDataLoaderIter
    replace(iterator, "__next__", _next_batch)


def mark_ended_loaders() -> None:
    """Record the mark `data_end` if an iteration over a loader has ended since the last call."""
    if ended_loaders:
        ended_loaders.clear()
        closed(opened("data_end"))


def _next_batch(original: Any) -> Any:
    made = in_span("data_wait", lambda *_: "")(original)

    @functools.wraps(original)
    def call(self: Any, *args: Any, **named: Any) -> Any:
        quietly(mark_ended_loaders)
        end = quietly(_watch_end, self)
        try:
            return made(self, *args, **named)
        except StopIteration:
            if end is not None:
                end()
            raise

    return call


def _watch_end(iterator: Any) -> Any:
    """Return a function that reports that a data loader's iterator has ended.

    The function is also called when Python frees the iterator.
    """
    end = iterator.__dict__.get(_END)
    if end is None or not end.alive:  # a loader may keep its iterator for the next epoch
        end = weakref.finalize(iterator, ended_loaders.append, 1)
        end.atexit = False
        setattr(iterator, _END, end)
    return end


def mark_files(torch: Any) -> None:
    """Record `torch.save` and `torch.load` as spans."""
    for name, place in (("save", 1), ("load", 0)):
        replace(torch, name, in_span("checkpoint", functools.partial(_path, name, place)))
        setattr(torch.serialization, name, getattr(torch, name))


def mark_stores(core: Any) -> None:
    """Record blocking calls to torch's stores as spans that name the keys."""
    for name in ("get", "multi_get", "wait"):
        replace(core.Store, name, functools.partial(_named, name))


def _named(name: str, original: Any) -> Any:
    made = in_span("store", functools.partial(_keys, name))(original)

    # pybind11 recognizes an overriding method by its code's name and first argument.
    def call(self: Any, *args: Any, **named: Any) -> Any:
        return made(self, *args, **named)

    call.__code__ = call.__code__.replace(co_name=name)
    call.__doc__ = original.__doc__
    return call


def mark_compilation(callback: Any) -> None:
    """Record each compilation by torch.compile as a span."""
    spans: list[Any] = []

    def begin(*_: Any) -> None:
        spans.append(opened("compile", "torch.compile"))

    def end(*_: Any) -> None:
        if spans:
            closed(spans.pop())

    callback.callback_handler.register_start_callback(begin)
    callback.callback_handler.register_end_callback(end)


def mark_function(name: str, module: Any) -> None:
    """Record calls to a module's checkpoint function as spans.

    References to the function in other loaded modules are replaced too.
    """
    original = getattr(module, name, None)
    replace(module, name, in_span("checkpoint", lambda *_: name))
    made = getattr(module, name, None)
    if original is None or made is original:
        return
    for other in sys.modules.copy().values():  # see `modules.py`: other threads import
        if isinstance(other, ModuleType) and other.__dict__.get(name) is original:
            other.__dict__[name] = made


def _path(name: str, place: int, *args: Any) -> str:
    target = args[place] if place < len(args) else ""
    text = os.fspath(target) if isinstance(target, (str, os.PathLike)) else type(target).__name__
    return f"torch.{name} {text}"[:_DETAIL_CHARS]


def _keys(name: str, *args: Any) -> str:
    keys = args[1] if len(args) > 1 else ""
    text = keys if isinstance(keys, str) else ", ".join(map(str, keys))
    return f"{name}({text!r})"[:_DETAIL_CHARS]
