"""Two launchers of one job, the second of which somebody starts again whenever it ends.

    python -m tests.launcher.jobs.soak FOLDER SEED NUM_FAULTS LIMIT_S [FAULTS]

Ends with the first launcher's exit code, once both have ended; 124 if they had to be killed.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

_POLL_S = 0.05
_LOST_AFTER_S = 5.0
_FROZEN_S = 8.0  # until a frozen launcher is woken: longer than the coordinator waits for it
_END_S = 30.0


def main() -> int:
    """Run the soak."""
    folder, limit_s = Path(sys.argv[1]), float(sys.argv[4])
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{probe.getsockname()[1]}"
    deadline_s = time.monotonic() + limit_s
    first = _start(0, folder, endpoint)
    second = _start(1, folder, endpoint)
    frozen_s = 0.0
    while first.poll() is None and time.monotonic() < deadline_s:
        time.sleep(_POLL_S)
        if second.poll():  # one that ended well knows that the job is over
            second = _start(1, folder, endpoint)
        frozen_s = frozen_s + _POLL_S if _state(second.pid) == "T" else 0.0
        if frozen_s > _FROZEN_S:
            second.send_signal(signal.SIGCONT)
    codes = [
        _end(process, max(_END_S, deadline_s - time.monotonic())) for process in (first, second)
    ]
    return 124 if None in codes else int(codes[0] or 0)


def _start(node: int, folder: Path, endpoint: str) -> subprocess.Popen[bytes]:
    rank = Path(__file__).with_name("soak_rank.py")
    return subprocess.Popen(
        [
            sys.executable, "-m", "echelon", "run", "--nnodes", "2", "--node-rank", str(node),
            "--nproc-per-node", "2", "--rdzv-endpoint", endpoint, "--max-restarts", "1000000",
            "--restart-policy", "always",
            "--shutdown-timeout", "0.5", "-r", "3", "--run-dir", str(folder / f"node_{node}"),
            "--rdzv-conf", f"join_timeout=60,lost_after={_LOST_AFTER_S:g}",
            str(rank), str(folder), sys.argv[2], sys.argv[3], *sys.argv[5:],
        ],
        env={**os.environ, "ECHELON_SECRET": "a-secret-of-the-tests"},
        stdin=subprocess.DEVNULL,
    )  # fmt: skip


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def _end(process: subprocess.Popen[bytes], limit_s: float) -> int | None:
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return None


if __name__ == "__main__":
    sys.exit(main())
