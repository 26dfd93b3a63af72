"""Run a command in new namespaces, and report everything that it leaves behind.

Nothing else runs in the namespaces, so all processes, shared-memory files and sockets that remain
were created by the command. Needs root, unshare and ip.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence

import pytest

_NAMESPACES = [
    "unshare", "--pid", "--net", "--ipc", "--mount", "--fork", "--kill-child", "--mount-proc"
]  # fmt: skip

# This script is process 1, so whatever the command left behind has become its child. What is found
# goes to the file named first. What is about to end has so many tenths of a second.
_SCRIPT = """
mount -t tmpfs tmpfs /dev/shm && ip link set lo up || exit 99
found=$1 patience=$2
shift 2
"$@"
code=$?
processes() {
    for folder in /proc/[0-9]*; do
        [ "$folder" = /proc/1 ] || ! read -r line 2>/dev/null < "$folder/stat" || \
            case "${line##*) }" in [ZX]*) ;; *)
            echo "process $(tr '\\0' ' ' 2>/dev/null < "$folder/cmdline")" ;; esac
    done
}
processes > "$found" # not in $(), which would be a process itself
while [ "$patience" -gt 0 ] && [ -s "$found" ]; do
    patience=$((patience - 1))
    sleep 0.1
    processes > "$found"
done
{
    processes
    for file in /dev/shm/* /dev/shm/.[!.]*; do [ -e "$file" ] && echo "segment $file"; done
    tail -n +2 /proc/net/unix | sed 's/^/unix socket /'
    tail -q -n +2 /proc/net/tcp /proc/net/tcp6 2>/dev/null | grep -v ' 06 ' | sed 's/^/tcp socket /'
} > "$found"
exit $code
"""


def _may_be_made() -> bool:
    if not shutil.which("unshare") or not shutil.which("ip"):
        return False
    probe = [*_NAMESPACES, "sh", "-c", "mount -t tmpfs tmpfs /dev/shm && ip link set lo up"]
    return subprocess.run(probe, capture_output=True, check=False).returncode == 0


needs_machine = pytest.mark.skipif(
    not _may_be_made(), reason="needs root, unshare and ip for namespaces"
)


def run_there(
    argv: Sequence[str],
    *,
    timeout_s: float,
    environ: Mapping[str, str] | None = None,
    patience_s: float = 30.0,
) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """Run a command; return the completed process, and one line for each item left behind.

    Args:
        argv: the command.
        timeout_s: how long the command may take.
        environ: variables to add to the command's environment.
        patience_s: how long to wait for remaining processes to exit before reporting them.
    """
    with tempfile.NamedTemporaryFile("r") as found:
        done = subprocess.run(
            [*_NAMESPACES, "sh", "-c", _SCRIPT, "sh", found.name, str(int(10 * patience_s)), *argv],
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout_s,
            env={**os.environ, **(environ or {})},
            stdin=subprocess.DEVNULL,
        )
        return done, found.read().splitlines()
