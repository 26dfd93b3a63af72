"""Starting the recorder of a process: its ring, its hooks, and what undoes them.

Imported only by a process that records. Hooks belong to the process that made them: a forked child
inherits them, and there they must do nothing (current.py, [Note: who may record]).
"""

from __future__ import annotations

import atexit
import faulthandler
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import IO

from echelon.host.identity import boot_id, start_ticks
from echelon.recorder.clock import NOT_MEASURED
from echelon.recorder.environment import Settings, claim_ownership
from echelon.recorder.pauses import GarbagePauses
from echelon.recorder.place import Place, bring_home, choose_place, claim_attempt
from echelon.recorder.recorder import Recorder
from echelon.recorder.ring import Ring
from echelon.recorder.schema import Identity

_stack_file: IO[bytes] | None = None


def start(settings: Settings) -> tuple[Recorder, Callable[[], None]] | None:
    """Open the ring and start to record; None if it is another process's to do so.

    Returns:
        The recorder, and what a forked child calls to leave it alone.

    Raises:
        OSError: the ring cannot be made.
    """
    try:
        rank_dir, settings = _claim(settings)
        return _start(settings, rank_dir)
    except FileExistsError:
        return None  # the ring has an owner


def _claim(settings: Settings) -> tuple[Path, Settings]:
    if settings.rank_dir is not None:
        settings.rank_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        return settings.rank_dir, settings
    assert settings.record_dir is not None
    if not claim_ownership(f"{os.getpid()}:{start_ticks(os.getpid()) or 0}"):
        raise FileExistsError
    rank_dir, attempt = claim_attempt(settings.record_dir, settings.rank)
    return rank_dir, replace(settings, attempt=attempt)


def _start(settings: Settings, rank_dir: Path) -> tuple[Recorder, Callable[[], None]]:
    place = choose_place(rank_dir, settings.ring_dir)
    ring = _open_ring(settings, place)
    recorder = Recorder(ring)
    recorder.identify(stack_signal=_register_stacks(rank_dir, settings.stack_signal))
    recorder.start_heartbeat()
    pauses = GarbagePauses(recorder)
    pauses.start()
    _chain_excepthook(recorder)

    def close() -> None:
        pauses.stop()
        recorder.close()
        if place.is_elsewhere and not settings.has_agent:
            bring_home(rank_dir)

    def leave() -> None:
        atexit.unregister(close)
        pauses.stop()
        recorder.disown()

    atexit.register(close)
    if not settings.has_agent:
        _watch_from_inside(recorder, settings, rank_dir)
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
    except OSError:
        place.give_up()
        raise
    asked = settings.has_agent and settings.ring_dir is not None  # whoever asked knows
    if place.is_elsewhere and settings.local_rank == 0 and not asked:
        print(f"echelon: rings are in {place.ring.parent.parent} ({place.reason})", file=sys.stderr)
    return ring


def _watch_from_inside(recorder: Recorder, settings: Settings, rank_dir: Path) -> None:
    from echelon.recorder.inside import InsideWatch

    assert settings.record_dir is not None
    record_dir = settings.record_dir.absolute()
    InsideWatch(recorder, rank_dir, record_dir, settings.stall_timeout_s).start()


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
        settings={**settings.allowed(), "ring": str(place.ring)},
    )


def _register_stacks(rank_dir: Path, number: int) -> int:
    """Let the agent ask for the stacks of all threads by a signal that nobody else uses."""
    global _stack_file
    if number == 0 or not hasattr(faulthandler, "register"):
        return 0
    if signal.getsignal(number) is not signal.SIG_DFL:
        return 0
    _stack_file = (rank_dir / "stacks").open("ab", buffering=0)
    faulthandler.register(number, file=_stack_file, all_threads=True, chain=False)
    if not faulthandler.is_enabled():
        faulthandler.enable()  # a segfault then names its line on stderr
    return number


def _chain_excepthook(recorder: Recorder) -> None:
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        try:
            recorder.last_words(kind, error, trace)
        except Exception as err:  # noqa: BLE001 -- the user's own error must still be shown
            print(f"echelon: the last words were not recorded: {err}", file=sys.stderr)
        previous(kind, error, trace)

    sys.excepthook = hook
