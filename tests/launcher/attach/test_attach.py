"""`fr-analyze --attach` on real processes that another launcher started; here, the test itself.

The cheap tests wait in torch's file of collectives without torch: py-spy and the kernel still see
real processes. Tests with real jobs under torchrun are `slow`, except for one.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.launcher import attach as table
from echelon.cli import analyze
from echelon.host.stacks import can_spy
from echelon.host.threads import threads
from echelon.launcher.attach.look import keep, look
from echelon.launcher.attach.ranks import numbered
from echelon.launcher.attach.verdict import judge
from tests.recorder.conftest import wait_until
from tests.support.ranks import run_ranks

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.skipif(not can_spy(), reason="needs py-spy"),
]

_C10D = """
import threading
def all_reduce(lasts_s):
    lock = threading.Lock()
    lock.acquire()
    while not lock.acquire(timeout=lasts_s):
        pass
"""
_RANK = """
import os, signal, sys, time
sys.path.insert(0, sys.argv[1])
from torch.distributed.distributed_c10d import all_reduce
def load():
    time.sleep(900)
fault = sys.argv[2]
print("ready", flush=True)
if fault == "load":
    load()
elif fault == "frozen":
    os.kill(os.getpid(), signal.SIGSTOP)
for batch in [1]:
    if fault == "left":
        break
    all_reduce({"waits": 900, "moves": 0.01}[fault])
all_reduce(900)
"""


@pytest.fixture
def start(tmp_path):
    """Start a rank by hand for each fault; return their pids."""
    package = tmp_path / "site-packages/torch/distributed"
    package.mkdir(parents=True)
    (package / "distributed_c10d.py").write_text(_C10D)
    for folder in (package, package.parent):
        (folder / "__init__.py").write_text("")
    script = tmp_path / "train.py"
    script.write_text(_RANK)
    started: list[subprocess.Popen[str]] = []

    def begin(*faults: str, world_size: int = 0, **environ: str) -> list[int]:
        size = world_size or len(faults)
        for rank, fault in enumerate(faults):
            own = {
                "RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank),
                "MASTER_ADDR": "test", "MASTER_PORT": str(tmp_path),
            }  # fmt: skip
            one = subprocess.Popen(
                [sys.executable, str(script), str(package.parents[1]), fault],
                env={**os.environ, **own, **environ},
                stdout=subprocess.PIPE,
                text=True,
            )
            started.append(one)
        for one, fault in zip(started, faults, strict=True):
            assert one.stdout.readline() == "ready\n"
            if fault in ("load", "waits", "moves", "left"):
                wait_until(lambda one=one: _is_waiting(one.pid), "it waits")
        return [one.pid for one in started]

    yield begin
    for one in started:
        for number in (signal.SIGCONT, signal.SIGKILL):
            one.send_signal(number)
        one.wait()
        one.stdout.close()


def _is_waiting(pid: int) -> bool:
    call = Path(f"/proc/{pid}/syscall").read_text().split()
    return call[0] in ("230", "202", "115", "98")  # sleeps, futexes


@pytest.fixture
def attach(capsys):
    def run(*arguments: object) -> tuple[int, dict[str, object], str]:
        code = analyze([*map(str, arguments), "--json", "--wait", "0.5"])
        seen = capsys.readouterr()
        return code, json.loads(seen.out) if seen.out else {}, seen.err

    return run


def test_the_rank_that_does_not_come_is_named_with_its_line(start, attach, tmp_path):
    pids = start("waits", "load", "waits")
    code, report, err = attach("--attach", pids[0], "--out", tmp_path / "kept")
    verdict = report["verdict"]
    assert (code, verdict["cause"], verdict["culprit_ranks"]) == (1, "host_hang", [1]), err
    assert "train.py:6 in load" in verdict["summary"]
    assert verdict["confidence"] == "likely", "two looks a second apart prove no hang"
    assert any("--wait" in line for line in verdict["would_settle"])
    assert verdict["fallout_ranks"] == [0, 2]
    assert [state_of(pid) for pid in pids] == ["S"] * 3
    files = {path.name for path in (tmp_path / "kept").iterdir()}
    assert files == {"incident.json", "rank_0", "rank_1", "rank_2"}
    assert analyze([str(tmp_path / "kept"), "--json"]) == 1


@pytest.mark.parametrize(
    ("faults", "culprits"),
    [
        (("waits", "left"), [1]),
        (("left", "waits", "waits"), [0]),
        (("left", "left", "waits"), [2]),
    ],
)
def test_the_rank_that_left_the_loop_is_told_from_those_in_it(start, attach, faults, culprits):
    pids = start(*faults)
    code, report, err = attach("--attach", pids[0])
    verdict = report["verdict"]
    assert (code, verdict["cause"]) == (1, "skipped_collective"), err
    assert (verdict["culprit_ranks"], verdict["confidence"]) == (culprits, "likely")
    assert "left the loop at train.py:13" in verdict["summary"]
    assert verdict["fallout_ranks"] == [one for one in range(len(faults)) if one not in culprits]


def test_a_job_that_moves_is_healthy(start, attach):
    pids = start("moves", "moves")
    code, report, err = attach("--attach", pids[1])
    assert (code, report["healthy"], report["verdict"]) == (0, True, None)
    assert "the job makes progress" in err


def test_a_frozen_rank_is_certain(start, attach):
    pids = start("waits", "frozen")
    wait_until(lambda: state_of(pids[1]) == "T", "it is stopped")
    _, report, _ = attach("--attach", pids[0])
    verdict = report["verdict"]
    assert (verdict["cause"], verdict["culprit_ranks"]) == ("frozen_process", [1])
    assert verdict["confidence"] == "certain"
    assert state_of(pids[1]) == "T", "looking continues nothing"


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_where_all_wait_and_ranks_are_elsewhere_nobody_is_blamed(start, attach):
    pids = start("waits", "waits", world_size=4)
    code, report, err = attach("--attach", pids[0], "--host", "gone", "--ssh", "false")
    verdict = report["verdict"]
    assert (code, verdict["cause"], verdict["culprit_ranks"]) == (1, "unknown", [])
    assert "gone: exit 1" in err, "a machine that does not answer is said"
    assert report["ranks_missing"] == [2, 3]
    assert any("ranks 2 and 3 (--host)" in line for line in verdict["would_settle"])


def test_a_rank_that_is_gone_where_the_whole_world_runs_is_dead(start, attach):
    pids = start("waits", world_size=2, LOCAL_WORLD_SIZE="2")
    verdict = attach("--attach", pids[0])[1]["verdict"]
    assert (verdict["cause"], verdict["culprit_ranks"]) == ("dead_process", [1])


def _ended_while(pids: list[int], killed: list[int], folder: Path, **launcher: bool):
    """Look at ranks of which some are killed between the looks, and return the verdict."""

    def idle(seconds: float) -> None:
        for pid in killed:
            os.kill(pid, signal.SIGKILL)
            wait_until(lambda pid=pid: state_of(pid) == "Z", "it has ended")
        killed.clear()
        time.sleep(seconds)

    below = folder / "look"
    below.mkdir()
    sighting = replace(look(numbered(pids), below, gap_s=0.5, idle=idle), **launcher)
    keep(sighting, below, len(pids), "")
    return judge(sighting, below, len(pids)).verdict


def test_a_job_that_ends_during_the_look_is_said_to_have_ended(start, tmp_path):
    pids = start("waits", "waits")
    verdict = _ended_while(pids, list(pids), tmp_path, is_watched=False)
    assert (verdict.cause.value, verdict.culprit_ranks) == ("unknown", ())
    assert verdict.summary.startswith("ranks 0 and 1 ended while they were being examined")
    assert verdict.evidence == ("ranks 0 and 1: killed by SIGKILL",)


def test_under_a_launcher_that_stops_at_a_failure_no_rank_that_ends_is_blamed(start, tmp_path):
    pids = start("waits", "waits", "waits")
    verdict = _ended_while(pids, pids[:2], tmp_path, is_watched=True)
    assert (verdict.cause.value, verdict.culprit_ranks) == ("unknown", ())
    assert verdict.summary.startswith("ranks 0 and 1 ended while they were being examined")


def test_a_rank_that_ends_during_the_look_while_others_wait_is_dead(start, tmp_path):
    pids = start("waits", "waits", "waits")
    verdict = _ended_while(pids, [pids[1]], tmp_path, is_watched=False)
    assert (verdict.cause.value, verdict.culprit_ranks) == ("dead_process", (1,))
    assert verdict.fallout_ranks == (0, 2)


def test_one_process_alone_says_what_it_cannot_know(start, attach):
    pids = start("load", "waits")
    code, report, _ = attach("--pid", pids[0])
    verdict = report["verdict"]
    assert (code, report["ranks_present"]) == (1, [0])
    assert "train.py:6 in load" in verdict["summary"]
    assert any("rank 1" in line and "--host" in line for line in verdict["would_settle"])


def test_another_machine_is_asked_through_ssh(start, attach, tmp_path):
    """A stand-in for ssh: it drops the host's name and runs the command here."""
    pids = start("waits", "load")
    ssh = tmp_path / "ssh"
    ssh.write_text(
        '#!/bin/sh\nshift\neval "set -- ${1#fr-analyze }"\n'
        f'exec "{sys.executable}" -c "import sys; from echelon.cli import analyze;'
        ' sys.exit(analyze())" "$@"\n'
    )
    ssh.chmod(0o700)
    code, report, err = attach("--pid", pids[0], "--host", "node7", "--ssh", ssh)
    verdict = report["verdict"]
    assert (code, report["ranks_present"]) == (1, [0, 1]), err
    assert (verdict["cause"], verdict["culprit_ranks"]) == ("host_hang", [1])


def test_without_py_spy_the_report_says_so(start, attach, monkeypatch):
    pids = start("waits", "load")
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    _, report, err = attach("--attach", pids[0])
    assert "py-spy is not installed" in err
    assert report["verdict"]["confidence"] == "possible"


@pytest.mark.parametrize("pid", [2**22 - 1])
def test_no_such_process_is_one_line(attach, pid):
    code, _, err = attach("--attach", pid)
    assert (code, err.count("\n")) == (2, 1)


def _train(rank: int, world_size: int, folder: str) -> dict[str, object] | None:
    """Train on two ranks, of which one sleeps; the third looks at them, and ends them."""
    if rank == 2:
        paths = [Path(folder) / str(one) for one in range(2)]
        wait_until(lambda: all(path.exists() for path in paths), "both have trained")
        pids = [int(path.read_text()) for path in paths]
        wait_until(lambda: _is_waiting(pids[1]), "one sleeps")
        wait_until(
            lambda: any(thread.is_in_collective for thread in threads(pids[0], [])),
            "the other waits for it",
        )
        ranks = numbered(pids)
        below = Path(folder) / "look"
        below.mkdir()
        sighting = look(ranks, below, gap_s=0.5)
        keep(sighting, below, 2, "")
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        return judge(sighting, below, 2).to_json()
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
    for step in range(3):
        if step == 2:
            (Path(folder) / f".{rank}").write_text(str(os.getpid()))
            (Path(folder) / f".{rank}").rename(Path(folder) / str(rank))
        while rank == 1 and step == 2:
            time.sleep(900)
        model(torch.ones(2, 4)).mean().backward()
    return None


def test_a_backward_pass_of_ddp_on_gloo_waits_for_the_rank_that_sleeps(tmp_path):
    """The one real job in CI; the others are `slow`."""
    pytest.importorskip("torch")
    codes = {0: -signal.SIGKILL, 1: -signal.SIGKILL}
    report = run_ranks(_train, 3, str(tmp_path), exit_codes=codes, timeout_s=60)[2]
    verdict = report["verdict"]
    assert (verdict["cause"], verdict["culprit_ranks"]) == ("host_hang", [1]), report
    assert "test_attach.py:" in verdict["summary"]
    assert verdict["fallout_ranks"] == [0]


@pytest.mark.slow
@pytest.mark.parametrize("fault", table.CAUSES)
def test_a_job_under_plain_torchrun(fault):
    job = table.Job(fault, 2)
    try:
        row = table.judge(fault, *table.attach(job.process.pid, 3.0))
    finally:
        job.end()
    assert (row["cause"], row["culprits"], row["line"]) == (True, True, True), row
