"""Bad days: the machine refuses disk, descriptors, processes or signals, or stops a process.

Every fault strikes jobs of one and of two nodes: before they start, before a rank fails, before all
ranks succeed, and before the user stops the job. Whatever the launcher can still do then, it never
reports a success that did not happen, never leaves a process behind, and prints one line that names
the fault.
"""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launcher.background import WAIT_S, Node
from tests.launcher.cluster import Cluster
from tests.support.machine import needs_machine
from tests.support.ranks import read_json

pytestmark = [pytest.mark.slow, pytest.mark.netns, needs_machine]

# The gate is a file with the exit code of rank 1; the others follow it, or are stopped.
_SCRIPT = """
import os, pathlib, signal, sys, time
rank, folder = int(os.environ["RANK"]), pathlib.Path(__file__).parent
if "--nobody" in sys.argv:
    os.setresuid(65534, 65534, 65534)
def end(code):
    (folder / "ended" / str(rank)).write_text(str(code))
    sys.exit(code)
signal.signal(signal.SIGTERM, lambda *_: end(0))
print("ready", flush=True)
while not (folder / "gate").exists():
    time.sleep(0.02)
code = int((folder / "gate").read_text())
for line in range(2000):
    print("x" * 100)
sys.stdout.flush()
if code and rank != 1:
    while True:
        signal.pause()
end(code)
"""


class Day:
    """One fault.

    Attributes:
        line: what is printed of it.
        before: the command that starts a launcher.
        arguments: of the ranks.
        options: of the launchers.
    """

    line = ""
    most_lines = 1  # of it, on each node
    at_start = 2  # the exit code of a job that meets the fault at its start
    before: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    options: tuple[str, ...] = ()

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run_dirs = folder

    def codes(self, moment: str, num_nodes: int) -> list[list[int]]:
        """Return what the launchers' exit codes may be."""
        code = {"start": self.at_start, "failure": 7, "success": 0, "stop": 143}[moment]
        return [[code] * num_nodes]

    def is_named(self, moment: str) -> bool:
        """Whether the launcher meets the fault at this moment."""
        return True

    def prepare(self) -> None:
        """Let the fault strike before the launchers start."""

    def strike_early(self, job: Cluster) -> None:
        """Let the fault strike launchers that have just begun."""

    def strike(self, job: Cluster) -> None:
        """Let the fault strike a running job."""

    def heal(self, job: Cluster) -> None:
        """Undo what would keep the job from its end."""

    def close(self) -> None:
        """Remove what was made."""


class FullDisk(Day):
    """No space where the run directories are."""

    line = "No space left on device"
    most_lines = 4  # of logs, of an incident, of the report, of the account of its time

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.run_dirs = folder / "small"
        self.run_dirs.mkdir()
        size = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(self.run_dirs)]
        subprocess.run(size, check=True, timeout=20)

    def prepare(self) -> None:
        self.strike(None)

    def strike(self, job: Cluster | None) -> None:
        full = (self.run_dirs / "full").open("wb", buffering=0)
        with full as file, contextlib.suppress(OSError):
            while file.write(bytes(4096)):
                pass

    def close(self) -> None:
        subprocess.run(["umount", "-l", str(self.run_dirs)], check=True, timeout=20)


class NoDescriptors(Day):
    """The launchers may open nothing more."""

    line = "Too many open files"

    def is_named(self, moment: str) -> bool:
        return moment in ("start", "failure")

    def prepare(self) -> None:
        self.before = ("prlimit", "--nofile=14:14")

    def strike(self, job: Cluster) -> None:
        for node in job.nodes:
            pid = node.process.pid
            num_open = max(int(fd.name) for fd in Path(f"/proc/{pid}/fd").iterdir()) + 1
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (num_open, num_open))


class NoProcesses(Day):
    """No process or thread can be made: a control group of the launchers is full."""

    line = "Resource temporarily unavailable"

    def is_named(self, moment: str) -> bool:
        return moment in ("start", "failure")

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._group = Path(f"/sys/fs/cgroup/pids/echelon-test-{uuid.uuid4().hex[:8]}")
        try:
            self._group.mkdir()
        except OSError as err:
            pytest.skip(f"no control group of processes can be made here: {err}")
        procs = self._group / "cgroup.procs"
        self.before = ("sh", "-c", f'echo $$ > {procs} && exec "$@"', "sh")

    def codes(self, moment: str, num_nodes: int) -> list[list[int]]:
        """gRPC aborts where it can start no thread, and its launcher and job with it.

        The other node dials again then, and may need a thread for that.
        """
        codes, aborted = super().codes(moment, num_nodes), -signal.SIGABRT
        if (moment, num_nodes) != ("failure", 2):
            return codes
        return [*codes, [aborted, 1], [aborted, aborted]]

    def prepare(self) -> None:
        (self._group / "pids.max").write_text("1")

    def strike(self, job: Cluster) -> None:
        (self._group / "pids.max").write_text("0")

    def close(self) -> None:
        """Remove the group, which is busy while the kernel takes its last process apart."""
        deadline_s = time.monotonic() + WAIT_S
        while self._group.exists():
            with contextlib.suppress(OSError):
                self._group.rmdir()
            assert time.monotonic() < deadline_s, self._group


class NoPermission(Day):
    """Ranks run as another user, and the launcher may not signal them."""

    line = "may not signal it"
    before = ("setpriv", "--bounding-set=-kill", "--inh-caps=-kill")
    arguments = ("--nobody",)
    options = ("--shutdown-timeout", "1")
    most_lines = 4  # of two ranks: when they live on, and when they are given up
    at_start = 0  # nobody has to be signaled

    def is_named(self, moment: str) -> bool:
        return moment in ("failure", "stop")

    def codes(self, moment: str, num_nodes: int) -> list[list[int]]:
        return [[1 if self.is_named(moment) else 0] * num_nodes]


class FrozenStore(Day):
    """The store's process is stopped."""

    line = "is stopped by a signal"
    options = ("--rdzv-conf", "join_timeout=5")

    def codes(self, moment: str, num_nodes: int) -> list[list[int]]:
        return [[2, 1][:num_nodes]] if moment == "start" else super().codes(moment, num_nodes)

    def strike(self, job: Cluster) -> None:
        self.strike_early(job)
        job.nodes[0].wait_for(self.line)

    def strike_early(self, job: Cluster) -> None:
        deadline_s = time.monotonic() + WAIT_S
        while not (stores := [pid for pid in job.marked() if b"echelon.store" in _command(pid)]):
            assert time.monotonic() < deadline_s, job.told()
        os.kill(stores[0], signal.SIGSTOP)


class StoppedLauncher(Day):
    """The launchers themselves are stopped, and continued after a while."""

    at_start = 0

    def strike_early(self, job: Cluster) -> None:
        select.select([], [], [], 0.3)
        self.strike(job)

    def strike(self, job: Cluster) -> None:
        for node in job.nodes:
            node.process.send_signal(signal.SIGSTOP)

    def heal(self, job: Cluster) -> None:
        select.select([], [], [], 1.5)
        for node in job.nodes:
            node.process.send_signal(signal.SIGCONT)


def _command(pid: int) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that every user may enter, unlike pytest's."""
    with tempfile.TemporaryDirectory(prefix="echelon-bad-day-", dir="/tmp") as name:
        made = Path(name)
        made.chmod(0o777)
        (made / "ended").mkdir()
        (made / "ended").chmod(0o777)
        yield made


@pytest.mark.parametrize("moment", ["start", "failure", "success", "stop"])
@pytest.mark.parametrize("num_nodes", [1, 2])
@pytest.mark.parametrize(
    "day", [FullDisk, NoDescriptors, NoProcesses, NoPermission, FrozenStore, StoppedLauncher]
)
def test_a_bad_day(folder, day, num_nodes, moment):
    bad = day(folder)
    job = Cluster(folder, _SCRIPT, *bad.arguments)
    try:
        nodes = _started(job, bad, num_nodes, moment)
        if moment != "start":
            for node in nodes:
                node.wait_for("ready", 2)
            bad.strike(job)
        if moment == "stop":
            for node in nodes:
                node.process.send_signal(signal.SIGTERM)
        else:
            (folder / "gate.part").write_text("7" if moment == "failure" else "0")
            (folder / "gate.part").rename(folder / "gate")
        bad.heal(job)
        _check(job, bad, moment)
    finally:
        for node in job.nodes:
            node.process.send_signal(signal.SIGCONT)
        job.close()
        for pid in job.marked():
            os.kill(pid, signal.SIGKILL)
        job.left()
        bad.close()


def _started(job: Cluster, bad: Day, num_nodes: int, moment: str) -> list[Node]:
    if moment == "start":
        bad.prepare()
    for rank in range(num_nodes):
        job.run_dir = bad.run_dirs / f"node_{rank}"
        place = ("--nnodes", str(num_nodes)) if num_nodes > 1 else ("--standalone",)
        job.start(*place, *bad.options, rank=rank, before=bad.before)
    if moment == "start":
        bad.strike_early(job)
    return job.nodes


def _check(job: Cluster, bad: Day, moment: str) -> None:
    """No false success, no orphan, and one clear line."""
    codes = [node.end() for node in job.nodes]
    ended = {path.name: path.read_text() for path in (job.folder / "ended").iterdir()}
    told = job.told()
    lines = [line for line in told.splitlines() if "| x" not in line]
    shown = "\n".join(lines)
    if moment in ("failure", "stop"):
        assert 0 not in codes, shown
    if 0 in codes:
        assert ended == {str(rank): "0" for rank in range(2 * len(job.nodes))}, shown
    report = job.nodes[0].run_dir / "report.json"
    if report.exists():
        assert read_json(report)["exit_code"] == codes[0], shown
    assert codes in bad.codes(moment, len(job.nodes)), shown
    assert not any("Traceback" in line or 'File "' in line for line in lines), shown
    naming = [line for line in lines if bad.line in line]
    if bad.line and bad.is_named(moment):
        assert 1 <= len(naming) <= bad.most_lines * len(job.nodes), shown
    left = [pid for pid in job.left() if f"pid {pid}" not in shown]
    assert left == [], [_command(pid) for pid in left]
