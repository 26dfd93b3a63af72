"""Find out whether a process's descendants are alive, and what they are waiting for.

The stack of a rank that is waiting for a DataLoader worker does not show what the worker is doing.
The worker is therefore examined too, from outside and without interrupting it.
"""

from __future__ import annotations

import os

from echelon.host.facts import HostChild
from echelon.host.procfs import read_text
from echelon.host.stacks import spy_stacks
from echelon.host.threads import descendants, threads

MAX_CHILDREN = 16
_MAX_COMMAND = 200
_MAX_STACK = 12 << 10
_EXIT_CODE_FIELD = 49  # in /proc/PID/stat, counted after the name; readable if ptrace is permitted


def look_at_children(pid: int, *, limit: int = MAX_CHILDREN) -> tuple[tuple[HostChild, ...], int]:
    """Examine up to `limit` descendants of a process.

    Returns:
        The examined descendants that still exist, and the total number of descendants.
    """
    below = descendants(pid)
    return tuple(child for one in below[:limit] if (child := look_at(one)).state), len(below)


def look_at(pid: int) -> HostChild:
    """Examine one process. The result's `state` is "" if the process no longer exists."""
    fields = read_text(f"/proc/{pid}/stat", "stat", []).rpartition(")")[2].split()
    if len(fields) < 22:
        return HostChild(pid=pid)
    state = fields[0]
    is_dead = state in ("Z", "X")
    command = read_text(f"/proc/{pid}/cmdline", "cmdline", []).replace("\0", " ").strip()
    main = () if is_dead else threads(pid, [], limit=1)
    return HostChild(
        pid=pid,
        command=command[:_MAX_COMMAND],
        state=state,
        call=main[0].call if main else "",
        wait_channel=read_text(f"/proc/{pid}/wchan", "wchan", []).strip("0\n"),
        exit_code=_exit_code(fields) if is_dead else None,
        stacks="" if is_dead or not _is_python(pid) else _main_stack(spy_stacks(pid)),
    )


def _exit_code(fields: list[str]) -> int | None:
    """Return a dead process's exit code, or None if it cannot be read.

    As in `subprocess`, the code is negative if a signal killed the process.
    """
    if len(fields) <= _EXIT_CODE_FIELD:
        return None
    status = int(fields[_EXIT_CODE_FIELD])
    if status == 0 and os.geteuid() != 0:
        return None  # without permission to read it, the kernel also shows 0
    return -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


def _is_python(pid: int) -> bool:
    """Return whether a process has loaded Python. Only then can py-spy read its stacks."""
    return "python" in read_text(f"/proc/{pid}/maps", "maps", [])


def _main_stack(stacks: str) -> str:
    """Extract the main thread's stack from a dump of all threads, and truncate it to 12 KiB."""
    blocks = [block.strip("\n") for block in stacks.split("\n\n") if block.strip()]
    mains = [block for block in blocks if block.endswith(" in <module>")]
    return (mains or blocks)[-1][:_MAX_STACK] if blocks else ""
