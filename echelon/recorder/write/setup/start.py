"""Start the recorder of a process: create the ring and install the hooks.

Only a process that writes a black box imports this module. In a forked child, the inherited hooks
do nothing (see current.py, [Note: who may record]). If the start fails, the ring is removed.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import IO

from echelon.errors import DumpFormatError
from echelon.host.identity import boot_id, pid_namespace, start_ticks
from echelon.recorder.clock import NOT_MEASURED
from echelon.recorder.current import say
from echelon.recorder.format.schema import Identity
from echelon.recorder.read import read_ring
from echelon.recorder.stall.inside import InsideWatch
from echelon.recorder.write.recorder import Recorder
from echelon.recorder.write.ring.ring import Ring
from echelon.recorder.write.setup.environment import Settings, claim_ownership
from echelon.recorder.write.setup.modules import list_modules
from echelon.recorder.write.setup.pauses import GarbagePauses
from echelon.recorder.write.setup.place import (
    Place,
    bring_home,
    choose_place,
    claim_attempt,
    set_aside,
)

# These signals end the program or cannot be caught: a handler of echelon would hide the reason.
_FATAL = frozenset({"SIGSEGV", "SIGBUS", "SIGABRT", "SIGFPE", "SIGILL", "SIGKILL", "SIGSTOP"})
# Python's message about an exception in a thread that `threading` did not start.
_RAW_THREAD = "in thread started by"
_UNNAMED = "without a name"
_stack_file: IO[bytes] | None = None


def start(settings: Settings) -> tuple[Recorder, Callable[[], None]] | None:
    """Open the ring and start recording; return None if another process records instead.

    Returns:
        The recorder, and a function that a forked child calls to stop recording.

    Raises:
        Exception: the start failed; the ring has been removed.
    """
    if settings.handles_faults:  # first, because the C core's handlers must be on top
        with contextlib.suppress(ValueError, OSError, RuntimeError):  # no standard error
            if not faulthandler.is_enabled():
                faulthandler.enable()  # a segfault then names its line on stderr
    try:
        rank_dir, settings = _claim(settings)
        place = choose_place(rank_dir, settings.ring_dir)
        ring = _open_ring(settings, place)
    except FileExistsError:
        return None  # the ring has an owner
    with contextlib.ExitStack() as undo:
        undo.callback(_remove, ring, place)
        started = _start(settings, rank_dir, place, ring, undo)
        undo.pop_all()
        return started


def _claim(settings: Settings) -> tuple[Path, Settings]:
    if settings.rank_dir is not None:
        settings.rank_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        if _was_left_by_another(settings.rank_dir / "ring"):
            set_aside(settings.rank_dir)
        return settings.rank_dir, settings
    assert settings.record_dir is not None
    own = f"{os.getpid()}:{start_ticks(os.getpid()) or 0}"
    if not settings.was_spawned and not claim_ownership(own):
        raise FileExistsError
    rank_dir, attempt = claim_attempt(settings.record_dir, settings.rank)
    return rank_dir, replace(settings, attempt=attempt)


def _was_left_by_another(path: Path) -> bool:
    """Return whether a ring's writer ran since this boot, in this PID namespace, and has ended."""
    try:
        owner = read_ring(path).identity
    except DumpFormatError:
        return False
    here = owner.boot_id == boot_id() and owner.settings.get("pids") == pid_namespace()
    return here and start_ticks(owner.pid) != owner.pid_start_ticks


def _start(
    settings: Settings, rank_dir: Path, place: Place, ring: Ring, undo: contextlib.ExitStack
) -> tuple[Recorder, Callable[[], None]]:
    recorder = Recorder(ring)
    undo.callback(recorder.close)
    number = _register_stacks(rank_dir, settings)
    if number:
        undo.callback(_unregister_stacks, number)
    if number and _stack_file is not None:
        settings_now = {**ring.identity.settings, "stacks_fd": _stack_file.fileno()}
        recorder.identify(stack_signal=number, settings=settings_now)
    if settings.handles_faults and recorder.native is not None:
        # On top of another runtime's handlers, echelon's would mistake its routine faults for the
        # end.
        recorder.native.write_faults(faulthandler.is_enabled())
    pauses = GarbagePauses(recorder)
    pauses.start()
    undo.callback(pauses.stop)
    watch = None if settings.has_agent else _watch(recorder, settings, rank_dir)
    _chain_hooks(recorder)
    recorder.start_heartbeat()
    if settings.modules_file is not None:
        list_modules(settings.modules_file, recorder)
    if watch is not None:
        watch.start()

    def close() -> None:
        pauses.stop()
        recorder.close()
        if place.is_elsewhere and not settings.has_agent:
            with contextlib.suppress(OSError):  # a full disk: the ring stays at its location
                bring_home(rank_dir)

    def leave() -> None:
        atexit.unregister(close)
        pauses.stop()
        recorder.disown()

    atexit.register(close)
    return recorder, leave


def _open_ring(settings: Settings, place: Place) -> Ring:
    identity = _identity(settings, place)
    try:
        ring = Ring(
            place.make(),
            identity,
            num_operations=settings.num_operations,
            num_spans=settings.num_spans,
        )
    except FileExistsError:
        raise
    except BaseException:
        place.give_up()
        raise
    asked = settings.has_agent and settings.ring_dir is not None  # a chosen folder needs no message
    if place.is_elsewhere and settings.local_rank == 0 and not asked:
        say(f"rings are in {place.ring.parent.parent} ({place.reason})")
    return ring


def _remove(ring: Ring, place: Place) -> None:
    """Close a ring and delete its file."""
    with contextlib.suppress(OSError):
        ring.path.unlink()
    place.give_up()
    ring.close()


def _watch(recorder: Recorder, settings: Settings, rank_dir: Path) -> InsideWatch:
    assert settings.record_dir is not None
    record_dir = settings.record_dir.absolute()
    return InsideWatch(recorder, rank_dir, record_dir, settings.stall_timeout_s)


def _identity(settings: Settings, place: Place) -> Identity:
    return Identity(
        rank=settings.rank,
        local_rank=settings.local_rank,
        world_size=settings.world_size,
        attempt=settings.attempt,
        job_id=settings.job_id,
        host=socket.gethostname(),
        boot_id=boot_id(),
        pid=os.getpid(),
        pid_start_ticks=start_ticks(os.getpid()) or 0,
        mono_ns=time.monotonic_ns(),
        wall_ns=time.time_ns(),
        clock_error_ns=0 if settings.has_rank_0s_clock else NOT_MEASURED,
        settings={**settings.allowed(), "ring": str(place.ring), "pids": pid_namespace()},
    )


def _register_stacks(rank_dir: Path, settings: Settings) -> int:
    """Register a signal with which the agent can request the stacks of all threads.

    Returns:
        The number of the signal; 0 if no signal was registered.
    """
    global _stack_file
    number = settings.stack_signal
    if number == 0 or not hasattr(faulthandler, "register"):
        return 0
    reason = _why_not(number)
    if reason:
        if settings.chose_signal:
            say(f"ECHELON_STACK_SIGNAL={number} is ignored: {reason}. Stacks are read without it")
        return 0
    try:
        _stack_file = (rank_dir / "stacks").open("ab", buffering=0)
        faulthandler.register(number, file=_stack_file, all_threads=True, chain=False)
    except (OSError, ValueError, RuntimeError) as err:
        say(f"no stack signal: {err}. Stacks are read without it")
        return 0
    return number


def _unregister_stacks(number: int) -> None:
    global _stack_file
    faulthandler.unregister(number)
    if _stack_file is not None:
        _stack_file.close()
        _stack_file = None


def _why_not(number: int) -> str:
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = f"signal {number}"
    if name in _FATAL:
        return f"{name} ends a program"
    try:
        return "" if signal.getsignal(number) is signal.SIG_DFL else f"{name} has a handler"
    except ValueError:
        return f"{name} is not a signal of this system"


def _chain_hooks(recorder: Recorder) -> None:
    """Install hooks that record uncaught exceptions and then call the existing hooks.

    If several threads fail, only the first exception is recorded.
    """
    before, thread_before, unraisable_before = (
        sys.excepthook,
        threading.excepthook,
        sys.unraisablehook,
    )

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        recorder.last_words(kind, error, trace)
        before(kind, error, trace)

    def thread_hook(args: threading.ExceptHookArgs) -> None:
        if args.exc_value is not None and not issubclass(args.exc_type, SystemExit):
            name = args.thread.name if args.thread is not None else _UNNAMED
            recorder.last_words(args.exc_type, args.exc_value, args.exc_traceback, thread=name)
        thread_before(args)

    def unraisable_hook(args: sys.UnraisableHookArgs) -> None:
        if args.exc_value is not None and (args.err_msg or "").endswith(_RAW_THREAD):
            recorder.last_words(args.exc_type, args.exc_value, args.exc_traceback, thread=_UNNAMED)
        unraisable_before(args)

    sys.excepthook = hook
    threading.excepthook = thread_hook
    sys.unraisablehook = unraisable_hook
