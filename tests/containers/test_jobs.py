"""Jobs in containers: what works there works, and what cannot is one line that says what to do."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from echelon.cli import analyze
from echelon.host.identity import find_process, pid_inside, start_ticks
from echelon.host.stacks import can_spy
from echelon.host.threads import children, descendants
from echelon.launcher.attach.look import ring_folder
from echelon.launcher.attach.ranks import environment, rank_of
from echelon.launcher.status.status import read_statuses, status_of
from echelon.recorder.read import read_ring
from tests.containers.box import WITHOUT_TRACING, container, echelon, needs_containers, run
from tests.recorder.conftest import wait_until

pytestmark = [pytest.mark.ranks, pytest.mark.netns, needs_containers]

_ARRAYS = """
import numpy, pathlib, sys, time, echelon.dist
world = echelon.dist.init()
array = numpy.ones(20_000_000, numpy.float32)  # 80 MB: more than the container's /dev/shm
world.all_reduce(array)
echelon.dist.shutdown()
print("sum", array[0], flush=True)
"""
_HANG = """
import ctypes, sys, time, echelon.dist
if "--untraceable" in sys.argv:
    ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE
import numpy
world = echelon.dist.init()
def stands():
    print("stands", flush=True)
    time.sleep(900)
for step in range(5):
    if step == 3 and world.rank == 1:
        stands()
    world.all_reduce(numpy.ones(4))
"""
_GROUPS = """
import echelon.dist
world = echelon.dist.init()
groups = [echelon.dist.new_group([0, 1]) for _ in range(8)]
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that every user may write, unlike pytest's."""
    with tempfile.TemporaryDirectory(prefix="echelon-container-") as name:
        made = Path(name)
        made.chmod(0o777)
        yield made


def _script(folder: Path, text: str) -> str:
    path = folder / "train.py"
    path.write_text(text)
    return str(path)


def _job(folder: Path, text: str, *options: str) -> list[str]:
    script = _script(folder, text)
    place = ["--standalone", "--nproc-per-node", "2", "--run-dir", str(folder / "run")]
    return echelon("run", *place, *options, script)


def test_big_arrays_on_a_read_only_system_as_a_user_without_a_name(folder):
    """No /tmp, no HOME, a host name that does not resolve, and 64 MB of /dev/shm."""
    command = container(folder, *_job(folder, _ARRAYS), read_only=True, nameless=True)
    code, told = run(command, cwd=folder)
    assert code == 0, told
    assert told.count("sum 2.0") == 2, told
    assert (
        sorted(path.name for path in (folder / "run").glob("rank_*/attempt_0/ring")) == ["ring"] * 2
    ), "the black boxes are brought home"


def test_a_run_directory_that_cannot_be_written_is_one_line(folder):
    job = echelon("run", "--standalone", "--run-dir", "/runs", _script(folder, ""))
    code, told = run(container(folder, *job, read_only=True, nameless=True), cwd=folder)
    assert code == 2, told
    (line,) = told.splitlines()
    assert "--run-dir" in line
    assert "Read-only file system" in line


@pytest.mark.slow
def test_a_full_shared_memory_is_named_with_the_option(folder):
    """Without memfd the groups' memory lies in /dev/shm: refused in one line, not SIGBUS later."""
    job = _job(folder, _GROUPS)
    code, told = run(container(folder, *job, shm="8m", memfd=False), cwd=folder)
    assert code == 1, told
    verdict = _verdict(folder)
    assert (verdict["cause"], verdict["culprit_ranks"]) == ("exception", [0]), told
    assert "No space left on device" in verdict["summary"]
    assert "--shm-size" in verdict["next_action"]


def test_without_the_right_to_trace_cause_and_rank_are_named(folder):
    options = ("--stall-timeout", "5", "--on-stall", "stop")
    job = [*WITHOUT_TRACING, *_job(folder, _HANG, *options), "--untraceable"]
    code, told = run(job, cwd=folder)
    assert code == 3, told
    verdict = _verdict(folder)
    assert (verdict["cause"], verdict["culprit_ranks"]) == ("host_hang", [1]), told
    (line,) = [line for line in told.splitlines() if line.strip().startswith("missing")]
    assert "SYS_PTRACE" in line, told


def _verdict(folder: Path) -> dict[str, object]:
    (path,) = (folder / "run").glob("dump/incident_0/verdict.json")
    found = json.loads(path.read_text())
    return found.get("verdict", found)


@pytest.fixture
def hanging(folder) -> Iterator[subprocess.Popen[str]]:
    """A job in a container whose rank 1 stands in its own code."""
    command = container(folder, *_job(folder, _HANG), nameless=True)
    with subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        stdin=subprocess.DEVNULL,
    ) as job:  # fmt: skip
        told = []
        for line in job.stdout:
            told.append(line)
            if "stands" in line:
                break
        else:
            raise AssertionError("".join(told))
        (first,) = children(job.pid)
        try:
            yield job
        finally:
            os.kill(first, signal.SIGKILL)  # the container's first process: it takes all others
            job.stdout.read()


def _ranks(job: subprocess.Popen[str]) -> dict[int, int]:
    """Return the host's pid of each rank."""
    found = {}
    for pid in descendants(job.pid):
        environ = environment(pid, [])
        if "RANK" in environ:
            found.setdefault(int(environ["RANK"]), pid)
    return found


def test_a_container_is_looked_at_from_its_host_and_from_inside(hanging, folder, capsys):
    """Its black boxes lie in a /dev/shm of its own, and its pids mean nothing outside."""
    wait_until(lambda: len(_ranks(hanging)) == 2, "both ranks")
    pids = _ranks(hanging)
    wait_until(lambda: _sequence(pids[0]) == 3, "rank 0 waits for rank 1")
    inside = pid_inside(pids[1])
    assert inside != pids[1]
    assert find_process(inside, start_ticks(pids[1])) == pids[1]

    out = folder / "seen"
    code = analyze(["--attach", str(pids[0]), str(pids[1]), "--json", "--wait", "0.5",
                    "--out", str(out)])  # fmt: skip
    seen = capsys.readouterr()
    _is_right(json.loads(seen.out), code, can_spy())
    assert sorted(path.name for path in out.glob("rank_*")) == ["rank_0", "rank_1"]

    enter = ["nsenter", f"--target={pids[1]}", "--pid", "--mount", "--net", "--ipc"]
    look = "import sys; from echelon.cli import analyze; sys.exit(analyze(sys.argv[1:]))"
    ask = [sys.executable, "-c", look, "--attach", "--json", "--wait", "0.5"]
    done = subprocess.run([*enter, *ask], capture_output=True, text=True, check=False, timeout=600)
    assert done.stdout, done.stderr
    _is_right(json.loads(done.stdout), done.returncode, can_spy())

    # As if the host's /dev/shm were the container's (docker --ipc=host): its pids are others' here.
    for rank in range(2):
        link = folder / f"run/rank_{rank}/attempt_0/ring"
        target = Path(f"/proc/{pids[1]}/root{link.readlink()}")
        link.unlink()
        link.symlink_to(target)
    phases = {one.rank: one.phase for one in read_statuses(folder / "run")}
    assert sorted(phases) == [0, 1]
    assert "gone" not in phases.values(), phases


def _sequence(pid: int) -> int | None:
    """Return the number of the last call in the black box of a rank, read from the host."""
    folder = ring_folder(rank_of(pid))
    assert folder is not None
    return status_of(read_ring(folder / "ring"), 0).sequence


def _is_right(report: dict[str, object], code: int, is_traced: bool) -> None:
    verdict = report.get("verdict", report)
    assert code == 1, report
    assert (verdict["cause"], verdict["culprit_ranks"]) == ("host_hang", [1]), report
    assert "all_reduce #3" in verdict["summary"], "the black box says which call"
    if is_traced:
        assert "in stands" in verdict["summary"], report
