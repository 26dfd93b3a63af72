"""What torchrun gets wrong and we must not; `benchmarks/launcher/run.py` measures both.

Rows that have their tests elsewhere: a killed agent, SIGTERM, exit code 42 (test_run.py), a lost
and a silent node (test_nodes.py), one node of two (test_roster.py).
"""

from __future__ import annotations

import os
import pickle
import shutil
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import grpc
import pytest

from benchmarks.launcher import rendezvous
from benchmarks.launcher import run as benchmark
from echelon.launcher.control.client import METHOD
from echelon.launcher.control.seal import NONCE_BYTES
from tests.support.ranks import read_json, run_echelon

pytestmark = pytest.mark.ranks


def _run(tmp_path, script, *options):
    path = tmp_path / "train.py"
    path.write_text(textwrap.dedent(script))
    done = run_echelon("run", "--run-dir", str(tmp_path / "run"), *options, str(path))
    return done, read_json(tmp_path / "run/report.json")


def test_an_unmodified_gloo_program_starts_again_and_meets_no_stale_keys(tmp_path):
    pytest.importorskip("torch")
    script = """
        import os, sys, torch, torch.distributed as dist
        dist.init_process_group("gloo")
        x = torch.ones(1)
        dist.all_reduce(x)
        if os.environ["TORCHELASTIC_RESTART_COUNT"] != "1" and dist.get_rank() == 1:
            sys.exit(1)
        dist.all_reduce(x)
        print("sum", x.item())
        dist.destroy_process_group()
        """
    done, report = _run(tmp_path, script, "--nproc-per-node", "2", "--max-restarts", "1")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["0| sum 4.0", "1| sum 4.0"]
    assert report["attempts"] == 2


def test_a_peer_that_ignores_sigterm_does_not_keep_the_job_from_starting_again(tmp_path):
    script = """
        import os, pathlib, signal, sys, time
        ready = pathlib.Path(sys.argv[0]).with_name("ready")
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "1":
            print("again")
        elif os.environ["RANK"] == "0":
            while not ready.exists():
                time.sleep(0.01)
            sys.exit(3)
        else:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            ready.touch()
            while True:
                signal.pause()
        """
    options = ("--nproc-per-node", "2", "--max-restarts", "1", "--shutdown-timeout", "0.5")
    done, report = _run(tmp_path, script, *options)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["0| again", "1| again"]
    assert report["incidents"][0]["verdict"]["culprit_ranks"] == [0]


def _two_failures(first: int, second: int) -> str:
    """Return a script of which two ranks fail, the second when the first one is gone."""
    return f"""
        import os, pathlib, select, signal, sys
        folder, rank = pathlib.Path(sys.argv[0]).parent, os.environ["RANK"]

        def wait_until(condition):
            while not condition():
                select.select([], [], [], 0.01)

        def tell(name, text):
            (folder / "part").write_text(text)
            (folder / "part").rename(folder / name)

        if rank == "{first}":
            tell("pid", str(os.getpid()))
            wait_until((folder / "watched").exists)
            os._exit(1)
        if rank == "{second}":
            wait_until((folder / "pid").exists)
            first = pathlib.Path("/proc", (folder / "pid").read_text())
            tell("watched", "")
            wait_until(lambda: not first.exists())
            os._exit(2)
        signal.pause()
        """


@pytest.mark.parametrize(("first", "second"), [(3, 0), (1, 2)])
def test_of_two_failures_the_earlier_is_the_root_cause(tmp_path, first, second):
    done, report = _run(tmp_path, _two_failures(first, second), "--nproc-per-node", "4")
    assert done.returncode == 1, done.stderr
    verdict = report["incidents"][0]["verdict"]
    assert (verdict["cause"], verdict["culprit_ranks"]) == ("dead_process", [first])


@pytest.mark.parametrize(("first", "second"), [(3, 0), (0, 3)])
def test_of_two_failures_on_two_nodes_the_earlier_is_the_root_cause(cluster, first, second):
    job = cluster(_two_failures(first, second))
    nodes = [job.start("--nnodes", "2", rank=rank) for rank in range(2)]
    assert [node.end() for node in nodes] == [1, 1], job.told()
    verdict = read_json(job.folder / "node_0/report.json")["incidents"][0]["verdict"]
    assert (verdict["cause"], verdict["culprit_ranks"]) == ("dead_process", [first])


def test_a_traceback_is_in_the_report_without_a_decorator(tmp_path):
    script = """
        import os, signal
        if os.environ["RANK"] == "1":
            raise KeyError("no such column")
        signal.pause()
        """
    done, report = _run(tmp_path, script, "--nproc-per-node", "2", "-r", "3")
    assert done.returncode == 1
    assert "KeyError: 'no such column'" in done.stderr, "the report alone: the stream is not shown"
    root_cause = report["incidents"][0]["root_cause"]
    assert (root_cause["rank"], root_cause["traceback"][-1]) == (1, "KeyError: 'no such column'")


def test_streams_of_rank_10_can_be_redirected(tmp_path):
    done = run_echelon(
        "run", "--nproc-per-node", "11", "-r", "10:3", "--run-dir", str(tmp_path / "run"),
        "--no-python", "sh", "-c", "echo out",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == sorted(f"{rank}| out" for rank in range(10))
    assert (tmp_path / "run/rank_10/attempt_0/stdout.log").read_text() == "out\n"


class _MakeFolder:
    """Unpickled, it makes a folder."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self):
        return os.mkdir, (str(self._path),)


def _pour(port: int, data: bytes) -> None:
    """Write bytes to a port; being hung up on is fine."""
    with socket.create_connection(("127.0.0.1", port), timeout=5) as peer:
        peer.sendall(data)
        peer.settimeout(0.2)
        try:
            peer.recv(100)
        except OSError:
            return


def _session(endpoint: str, *frames: bytes) -> grpc.StatusCode:
    """Send frames as a node would; return how the coordinator ended the session."""
    with grpc.insecure_channel(endpoint, [("grpc.use_local_subchannel_pool", 1)]) as channel:
        try:
            list(channel.stream_stream(METHOD)(iter(frames), timeout=20))
        except grpc.RpcError as err:
            return err.code()
    return grpc.StatusCode.OK


def test_what_a_stranger_writes_is_never_unpickled_and_hurts_nobody(cluster, tmp_path):
    job = cluster("print('worked')")
    marker = tmp_path / "executed"
    pickled = pickle.dumps(_MakeFolder(marker))
    pickle.loads(pickled)
    marker.rmdir()  # whoever unpickles it makes the folder: just now we did
    first = job.start("--nnodes", "2", rank=0)
    first.wait_for("ranks on each of 2 nodes")
    store_port = int(read_json(first.run_dir / "job.json")["endpoint"].rpartition(":")[2])
    garbage = (pickled, b"\x80\x04garbage", bytes(range(256)) * 64)
    for data in garbage:
        _pour(store_port, data)
        _pour(int(job.endpoint.rpartition(":")[2]), data)
        nonce = b"n" * NONCE_BYTES
        for frames in ((data,), (nonce, data), (nonce, bytes(40) + data)):
            assert _session(job.endpoint, *frames) is grpc.StatusCode.UNAUTHENTICATED
    second = job.start("--nnodes", "2", rank=1)
    assert (first.end(), second.end()) == (0, 0), job.told()
    assert not marker.exists()


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler, to shift a clock")
def test_nodes_whose_wall_clocks_are_apart_work_together(cluster, tmp_path):
    job = cluster("print('worked')")

    library = benchmark.shifted_clock(tmp_path)
    shift = {"LD_PRELOAD": str(library), "CLOCK_SHIFT_S": "-900"}
    tell = [sys.executable, "-c", "import time; print(time.time())"]
    there = subprocess.check_output(tell, env={**os.environ, **shift})
    here = subprocess.check_output(tell)
    assert float(here) - float(there) > 800, "the clock was shifted"
    first = job.start("--nnodes", "2", rank=0)
    second = job.start("--nnodes", "2", rank=1, environ=shift)
    assert (first.end(), second.end()) == (0, 0), job.told()
    assert sum("worked" in line for line in second.lines) == 2


def test_many_agents_meet(tmp_path):
    measured = rendezvous.in_fresh_process(32, steady_s=1.0)
    assert measured.cpu_s > 0
    assert measured.loss_s > -0.05, "the first look comes 0.1 s after the connection broke"
    assert measured.failure_s >= 0
