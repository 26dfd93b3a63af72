"""Run one probe: read a task from stdin and write a finding to stdout.

The launcher starts this program as `python -m echelon.launcher.doctor.probes`.
"""

from __future__ import annotations

import contextlib
import socket
import sys

from echelon.launcher.doctor.probes import finding
from echelon.launcher.doctor.probes.device import probe_device
from echelon.launcher.doctor.probes.finding import Finding, State, Task
from echelon.launcher.doctor.probes.memory import probe_memory
from echelon.launcher.doctor.probes.pair import Listener, probe_pair
from echelon.launcher.doctor.probes.storage import probe_storage


def run(task: Task) -> Finding:
    """Run a probe in this process. Hangs if the tested resource hangs."""
    if task.probe == finding.STORAGE:
        return probe_storage(task.folder)
    if task.probe == finding.MEMORY:
        return probe_memory()
    if task.probe == finding.DEVICE:
        return probe_device()
    if task.probe == finding.NETWORK:
        return probe_pair(task)
    text = f"this version has no probe {task.probe!r}"
    return Finding(probe=task.probe, state=State.SKIPPED, text=text)


def _listen(task: Task) -> None:
    """Open a listener, report its port as a finding, and keep it open until stdin is closed."""
    with contextlib.closing(Listener(task.token)) as listener:
        port = {"port": float(listener.port)}
        host = socket.gethostname()
        print(Finding(probe=task.probe, state=State.WHOLE, text=host, figures=port).pack(),
              flush=True)  # fmt: skip
        sys.stdin.read()


def main() -> None:
    """Read one task, write the finding, and exit."""
    task = Task.unpack(sys.stdin.readline())
    if task.probe == finding.LISTEN:
        _listen(task)
    else:
        print(run(task).pack(), flush=True)


if __name__ == "__main__":
    main()
