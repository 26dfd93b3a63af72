"""Check for resources and permissions that are often missing in a container.

Each check returns a `Check` and never raises. If a resource or permission is missing, the check's
text names the container option that provides it.
"""

from __future__ import annotations

import getpass
import os
import pwd
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from echelon.host.cgroup import Limits, limits
from echelon.host.facts import TRACING
from echelon.host.identity import pid_namespace
from echelon.host.native_stacks import native_stacks
from echelon.host.stacks import can_spy, spy_stacks
from echelon.launcher.doctor.check import Check

_FIRST_PID_NAMESPACE = 0xEFFFFFFC  # the kernel's own, PROC_PID_INIT_INO
_YAMA = Path("/proc/sys/kernel/yama/ptrace_scope")
_FEW_PROCESSES = 64  # per rank: torch's, OpenMP's and the loaders' threads
_SPY_S = 10.0
_PROGRAM = "print('ready', flush=True); input()"


def tracing() -> Check:
    """Check whether the launcher is allowed to read the memory of the processes that it starts."""
    try:
        with subprocess.Popen(
            [sys.executable, "-S", "-c", _PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as child:
            assert child.stdout is not None
            child.stdout.readline()
            refused = _is_refused(child.pid)
            child.kill()
    except OSError as err:
        return Check("tracing", f"not tested: no process can be started ({err.strerror})", ok=False)
    if refused:
        return Check(
            "tracing",
            "not permitted: stacks of ranks are requested by signal instead, which may end a hang "
            "(container: --cap-add SYS_PTRACE)",
        )
    scope = _yama_scope()
    if scope == 1:
        return Check("tracing", "permitted below a launcher; --attach needs ptrace_scope 0 or root")
    return Check("tracing", "permitted for processes of this user")


def _is_refused(pid: int) -> bool:
    denied: list[str] = []
    if can_spy():
        return not spy_stacks(pid, _SPY_S, denied) and TRACING in denied
    native_stacks(pid, denied)
    return bool(denied)


def _yama_scope() -> int:
    try:
        return int(_YAMA.read_text())
    except (OSError, ValueError):
        return 0


def pid_namespace_check() -> Check:
    """Check whether this process runs in the host's PID namespace."""
    inode = pid_namespace()
    if not inode:
        return Check("pids", "not permitted to read the PID namespace")
    if inode == _FIRST_PID_NAMESPACE:
        return Check("pids", "the host's own")
    return Check(
        "pids",
        "a separate PID namespace (container): pids in reports are this container's; from the "
        "host, `fr-analyze --attach` finds its ranks by their environment",
    )


def limits_check() -> Check:
    """Check the memory and process limits of the control groups that this process belongs to."""
    denied: list[str] = []
    found = limits(os.getpid(), denied)
    if denied:
        return Check("cgroup", "not permitted to read: a kill for memory cannot be recognized")
    parts, ok = _memory(found)
    left = None
    if found.max_processes is not None:
        used = found.num_processes or 0
        left = found.max_processes - used
        parts.append(f"{used} of {found.max_processes} processes and threads")
    if left is not None and left < _FEW_PROCESSES * (os.cpu_count() or 1):
        parts.append("too few for ranks with threads and loaders (docker --pids-limit)")
        ok = False
    return Check("cgroup", ", ".join(parts) if parts else "no limits", ok)


def _memory(found: Limits) -> tuple[list[str], bool]:
    if found.memory_limit_bytes is None:
        return [], True
    used = found.memory_bytes or 0
    text = f"{used / 1e9:.1f} of {found.memory_limit_bytes / 1e9:.1f} GB of memory in use"
    if found.oom_kills:
        text += f" ({found.oom_kills} processes killed for memory so far)"
    return [text], used - found.reclaimable_bytes < 0.95 * found.memory_limit_bytes


def user() -> Check:
    """Check that the user has a name and a home directory, which compilers and caches require."""
    uid = os.getuid()
    try:
        name = getpass.getuser()  # from USER and others, otherwise from the user database
    except (KeyError, OSError):
        return Check(
            "user",
            f"uid {uid} has no name: torch.compile of older torch needs one (set USER to any name)",
        )
    home = os.environ.get("HOME") or _home(uid)
    if not home or not os.access(home, os.W_OK):
        return Check("user", f"{name} ({uid}), but the home is not writable: set HOME for caches")
    return Check("user", f"{name} ({uid})")


def user_name() -> str:
    """Return the user's name, or "" if the uid has none."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return ""


def _home(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_dir
    except KeyError:
        return ""


def temporary_folder() -> Check:
    """Check that a writable folder for temporary files exists."""
    try:
        folder = tempfile.gettempdir()
        free = shutil.disk_usage(folder).free
    except OSError:
        return Check(
            "temporary files", "no writable folder: mount one at /tmp, or set TMPDIR", False
        )
    return Check("temporary files", f"{folder}: {free / 1e9:.1f} GB free")
