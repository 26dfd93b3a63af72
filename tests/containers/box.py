"""A container for tests: namespaces of its own, a small /dev/shm, and what else one takes away.

Namespaces of processes, mounts, network, IPC and host name. As an option: a user without a name or
privileges, a file system that cannot be written (but for the folder of the test), no memfd.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

_NAMESPACES = [
    "unshare", "--pid", "--net", "--ipc", "--uts", "--mount", "--fork", "--kill-child",
    "--mount-proc",
]  # fmt: skip
NAMELESS_USER = 1234560  # as OpenShift gives them: no entry in passwd

# folder, size of /dev/shm, whether all else is read-only; then a command. The shell stays: it ends
# with `unshare`, and the container with it; a change of user would undo that.
_SCRIPT = """
mount -t tmpfs -o mode=1777,size="$2" tmpfs /dev/shm && ip link set lo up && hostname nowhere \\
    || exit 99
if [ "$3" = read-only ]; then
    mount --bind "$1" "$1" && mount --bind / / && mount -o remount,bind,ro / || exit 98
    cd "$1" && mount --bind "$1" /mnt 2>/dev/null
fi
shift 3
"$@"
exit $?
"""

# Reading the checkout is all that such a user may do beyond his own.
_AS_NAMELESS = [
    "setpriv", f"--reuid={NAMELESS_USER}", "--regid=0", "--clear-groups",
    "--inh-caps=-all,+dac_read_search", "--ambient-caps=+dac_read_search",
    "--bounding-set=-all,+dac_read_search", "--no-new-privs",
    "env", "-u", "HOME", "-u", "USER", "-u", "LOGNAME", "-u", "TMPDIR",
]  # fmt: skip
WITHOUT_TRACING = ("setpriv", "--bounding-set=-sys_ptrace", "--inh-caps=-sys_ptrace")

# A filter of the kernel that answers some calls with EPERM, as a container's profile does.
_DENY = """
import ctypes, os, struct, sys
numbers = [int(text) for text in sys.argv[1].split(",")]
code = [(0x20, 0, 0, 0)]
code += [(0x15, len(numbers) - at, 0, number) for at, number in enumerate(numbers)]
code += [(0x06, 0, 0, 0x7FFF0000), (0x06, 0, 0, 0x00050001)]
class Program(ctypes.Structure):
    _fields_ = [("size", ctypes.c_ushort), ("code", ctypes.c_char_p)]
program = Program(len(code), b"".join(struct.pack("HBBI", *one) for one in code))
libc = ctypes.CDLL(None)
assert libc.prctl(38, 1, 0, 0, 0) == 0
assert libc.prctl(22, 2, ctypes.byref(program), 0, 0) == 0
os.execvp(sys.argv[2], sys.argv[2:])
"""
_MEMFD_CREATE = {"x86_64": "319", "aarch64": "279"}


def container(
    folder: Path,
    *command: str,
    shm: str = "64m",
    read_only: bool = False,
    nameless: bool = False,
    memfd: bool = True,
) -> list[str]:
    """Return the command line that runs `command` in a container.

    Args:
        folder: of the test; with `read_only` the only one that can be written.
        shm: size of /dev/shm.
        nameless: as a user without a name, a home and privileges.
        memfd: False: `memfd_create` is refused.
    """
    inner = list(command)
    if not memfd:
        import platform

        inner = [sys.executable, "-c", _DENY, _MEMFD_CREATE[platform.machine()], *inner]
    if nameless:
        inner = [*_AS_NAMELESS, *inner]
    mode = "read-only" if read_only else "writable"
    return [*_NAMESPACES, "sh", "-c", _SCRIPT, "sh", str(folder), shm, mode, *inner]


def echelon(*arguments: str) -> list[str]:
    """Return the command line of an `echelon` command."""
    return [sys.executable, "-m", "echelon", *arguments]


def _may_be_made() -> bool:
    if not all(map(shutil.which, ("unshare", "ip", "setpriv", "nsenter"))):
        return False
    probe = container(Path("/tmp"), "true", nameless=True)
    return subprocess.run(probe, capture_output=True, check=False).returncode == 0


def run(argv: Sequence[str], *, cwd: Path, timeout_s: float = 120) -> tuple[int, str]:
    """Run a command to its end; return its exit code and all that it printed."""
    done = subprocess.run(
        argv, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
        timeout=timeout_s, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    return done.returncode, done.stdout


needs_containers = pytest.mark.skipif(
    not _may_be_made(), reason="needs root, unshare, nsenter, setpriv and ip for namespaces"
)
