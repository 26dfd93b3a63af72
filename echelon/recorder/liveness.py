"""Whether a rank lives, as seen from outside: stopped, holding the GIL, waiting or running.

Three facts tell them apart. The kernel says whether the process is stopped, frozen or gone. The
heartbeat comes from a Python thread of its own: while the process is not stopped, it falls silent
only if other code keeps the interpreter's lock. And processor time tells running from waiting.
"""

from __future__ import annotations

from enum import Enum

HEARTBEAT_S = 0.5
STALE_S = 5 * HEARTBEAT_S  # a busy machine delays a beat; a held lock delays all of them


class Liveness(Enum):
    """What a process is doing."""

    GONE = "it has ended"
    STOPPED = "it was stopped by a signal or frozen: no thread of it runs"
    GIL_HELD = "code in it holds Python's lock and does not let go: no Python thread runs"
    RUNNING = "it uses the processor, or would"
    WAITING = "it waits, and could run"
    UNKNOWN = "it has no heartbeat to judge by"


_GONE = frozenset({"", "Z", "X", "x"})
_STOPPED = frozenset({"T", "t"})
_BUSY_SHARE = 0.5


def liveness(
    process_state: str,
    heartbeat_mono_ns: int,
    now_mono_ns: int,
    *,
    cpu_share: float | None = None,
    frozen: bool | None = None,
) -> Liveness:
    """Judge by /proc's state letter ("": no such process) and the age of the last heartbeat.

    Args:
        heartbeat_mono_ns: 0 if the process has no recorder.
        cpu_share: of one core; None is taken for waiting.
        frozen: whether its cgroup is frozen, which the state letter does not tell.
    """
    if process_state in _GONE:
        return Liveness.GONE
    if process_state in _STOPPED or frozen:
        return Liveness.STOPPED
    if heartbeat_mono_ns == 0:
        return Liveness.UNKNOWN
    if now_mono_ns - heartbeat_mono_ns > STALE_S * 1e9:
        return Liveness.GIL_HELD
    # On a machine with too much to do a busy process gets little, but it stays runnable.
    busy = process_state == "R" or (cpu_share is not None and cpu_share > _BUSY_SHARE)
    return Liveness.RUNNING if busy else Liveness.WAITING
