"""A job leaves nothing behind: no process, no shared memory, no socket, in a machine of its own.

Each job runs in fresh pid, network, ipc and mount namespaces, so that whatever is found there
afterwards is its own.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

_BREAK_IT = Path(__file__).parents[1] / "examples/break_it.py"
_NAMESPACES = ["unshare", "--pid", "--net", "--ipc", "--mount", "--fork", "--mount-proc"]

# Processes 1 (this script) and what `ls` itself starts are there anyway.
_SCRIPT = """
mount -t tmpfs tmpfs /dev/shm && ip link set lo up || exit 99
"$@"
echo "exit code $?" >&2
for pid in $(ls /proc | grep -E '^[0-9]+$'); do
    [ "$pid" = $$ ] || [ "$(cut -d' ' -f4 /proc/$pid/stat 2>/dev/null)" = $$ ] || \
        { [ -d /proc/$pid ] && echo "process $pid: $(tr '\\0' ' ' < /proc/$pid/cmdline)"; }
done
for file in /dev/shm/* /dev/shm/.[!.]*; do [ -e "$file" ] && echo "segment $file"; done
tail -n +2 /proc/net/unix | sed 's/^/unix socket /'
tail -q -n +2 /proc/net/tcp /proc/net/tcp6 2>/dev/null | grep -v ' 06 ' | sed 's/^/tcp socket /'
exit 0
"""


def _may_unshare() -> bool:
    if not shutil.which("unshare") or not shutil.which("ip"):
        return False
    probe = [*_NAMESPACES, "sh", "-c", "mount -t tmpfs tmpfs /dev/shm && ip link set lo up"]
    return subprocess.run(probe, capture_output=True, check=False).returncode == 0


pytestmark = [
    pytest.mark.netns,
    pytest.mark.skipif(not _may_unshare(), reason="needs root, unshare and ip for namespaces"),
    pytest.mark.skipif(not _BREAK_IT.exists(), reason="the examples are not here"),
]


@pytest.mark.parametrize(
    ("fault", "code"),
    [("none", 0), ("kill", 137), ("hang", 3)],
)
def test_a_job_leaves_nothing(fault, code, tmp_path):
    pytest.importorskip("torch")
    job = [
        sys.executable, "-m", "echelon", "run", "--nproc-per-node", "4", "--stall-timeout", "5",
        "--on-stall", "stop", "--run-dir", str(tmp_path / "run"),
        str(_BREAK_IT), "--fault", fault, "--rank", "1",
    ]  # fmt: skip
    done = subprocess.run(
        [*_NAMESPACES, "sh", "-c", _SCRIPT, "sh", *job],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stderr
    assert f"exit code {code}" in done.stderr, done.stderr
    left = [line for line in done.stdout.splitlines() if "| " not in line]
    assert left == []
    own = {path.name for path in tmp_path.iterdir() if not path.name.startswith("torchinductor")}
    assert own == {"run"}  # torch makes a cache folder of its own
    assert not any(path.is_socket() or path.is_fifo() for path in tmp_path.rglob("*"))


def test_the_search_itself_finds_leftovers(tmp_path):
    leave = (
        "import os, socket, sys\n"
        "open('/dev/shm/left', 'w').close()\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    s = socket.socket(socket.AF_UNIX); s.bind('\\0left'); s.listen()\n"
        "    os.execv('/bin/sleep', ['sleep', '5']) if os.fork() else os.read(0, 1)\n"
        "    import signal; signal.pause()\n"
    )
    done = subprocess.run(
        [*_NAMESPACES, "sh", "-c", _SCRIPT, "sh", sys.executable, "-c", leave],
        capture_output=True, text=True, check=False, timeout=60, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert "segment /dev/shm/left" in done.stdout
    assert "process " in done.stdout
