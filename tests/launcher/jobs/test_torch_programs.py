"""Unmodified torch programs: they import nothing of echelon, and yet the job is explained."""

from __future__ import annotations

import os
import signal
import textwrap

import pytest

from echelon.host.stacks import can_spy
from echelon.launcher.incident.torch_dumps import TorchDump, dump_path, torch_environment
from tests.launcher.background import Node
from tests.support.hosts import hosts, needs_hosts
from tests.support.ranks import read_json, run_echelon

pytest.importorskip("torch")
pytestmark = pytest.mark.ranks

_TRAIN = """
import os, sys, threading, time
import torch
import torch.distributed as dist

def load_batch():
    time.sleep(3600)

def serve_dumps():
    # What torch's NCCL backend does with these two variables, on what Gloo has recorded.
    def content():
        return torch._C._distributed_c10d._dump_fr_trace(True, True, False)
    def dump():
        with open(os.environ["TORCH_FR_DUMP_TEMP_FILE"] + os.environ["RANK"], "wb") as file:
            file.write(content())
    def watch():
        while True:
            time.sleep(0.1)
            if me == 0 and waiting.is_set():
                dump()
                return
            if os.read(pipe, 128):
                dump()
    name = os.environ["TORCH_NCCL_DEBUG_INFO_PIPE_FILE"] + os.environ["RANK"] + ".pipe"
    content()  # the first loads hundreds of modules, longer than a busy machine has time later
    os.mkfifo(name)
    pipe = os.open(name, os.O_RDONLY | os.O_NONBLOCK)
    threading.Thread(target=watch, daemon=True).start()

fault = sys.argv[1]
me = int(os.environ["RANK"])
if fault == "never comes" and me == 1:
    load_batch()
dist.init_process_group("gloo")
x = torch.ones(64)
waiting = threading.Event()
if fault == "dumps":
    from echelon.recorder.current import current  # as if its tensors lay on a device
    current().identify(settings={**current().identity.settings, "device_operations": True})
    serve_dumps()
for step in range(6):
    if step == 4:
        waiting.set()
    dist.all_reduce(x)
    if me == 1 and step == 3:
        if fault in ("sleeps", "dumps"):
            load_batch()
        while fault == "spins":
            pass
        if fault == "raises":
            raise ValueError("a bad batch")
print("sum", int(x[0]) > 0, flush=True)
dist.destroy_process_group()
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(textwrap.dedent(_TRAIN))
    return str(path)


@pytest.fixture
def train(tmp_path, script):
    def run(fault: str, *options: str):
        done = run_echelon(
            "run", "--nproc-per-node", "2", "--on-stall", "stop", "--stall-timeout", "5",
            "--run-dir", str(tmp_path / "run"), *options, script, fault,
        )  # fmt: skip
        verdict = tmp_path / "run/dump/latest/verdict.json"
        return done, read_json(verdict)["verdict"] if verdict.exists() else None

    return run


@pytest.mark.parametrize(
    ("fault", "does"),
    [
        ("sleeps", "sleeps (clock_nanosleep)"),
        ("never comes", "sleeps (clock_nanosleep)"),
        ("spins", "runs"),
    ],
)
def test_a_hung_program_names_the_rank_that_the_others_wait_for(train, fault, does):
    options = ("--stall-timeout", "2") if fault == "never comes" else ()  # five times that long
    done, verdict = train(fault, *options)
    assert done.returncode == 3, done.stderr
    assert (verdict["cause"], verdict["culprit_ranks"]) == ("host_hang", [1]), verdict
    assert any("rank 1" in line for line in verdict["evidence"])
    if not can_spy():
        assert f"rank 1 {does}, outside any collective" in verdict["summary"]
        assert any("py-spy" in line for line in verdict["would_settle"])
    elif fault == "sleeps":
        assert verdict["confidence"] == "certain", verdict
        assert "in load_batch" in verdict["summary"], "py-spy names the line"


def test_a_crash_names_the_rank_and_not_its_victims(train):
    done, verdict = train("raises", "--stall-timeout", "60")  # ends by itself, if slowly
    # Torch's threads may call std::terminate while the interpreter ends: SIGABRT then, and the
    # job's exit code is what rank 1 really ended by, as the evidence says.
    aborted = any("rank 1 ended by SIGABRT" in line for line in verdict["evidence"])
    assert done.returncode == (128 + signal.SIGABRT if aborted else 1), done.stderr
    assert (verdict["cause"], verdict["culprit_ranks"]) == ("exception", [1]), verdict
    assert "a bad batch" in verdict["summary"]


@pytest.mark.slow  # the launcher waits 12 s for dumps, which three ranks of a busy machine may miss
def test_torchs_own_dumps_are_collected_and_analyzed(train, tmp_path):
    """Rank 0's appears, as if its watchdog had given up; the others are asked for theirs.

    A record of ours that misses what was called on a device does not stand in for them.
    """
    done, verdict = train("dumps", "--nproc-per-node", "3", "--stall-timeout", "60")
    assert done.returncode == 3, done.stderr
    assert (verdict["cause"], verdict["culprit_ranks"]) == ("host_hang", [1]), verdict
    assert (verdict["operation"], verdict["group"]) == ("all_reduce", "default_pg")
    incident = tmp_path / "run/dump/latest"
    reason = read_json(incident / "incident.json")["reason"]
    assert reason == "rank 0 wrote a dump of torch's flight recorder"
    assert {path.name for path in incident.glob("torch_rank_*")} == {
        f"torch_rank_{rank}" for rank in range(3)
    }
    assert not list((tmp_path / "run").rglob("*.pipe"))


@pytest.mark.netns
@needs_hosts
def test_a_program_on_two_hosts_meets_at_our_store(script, tmp_path):
    with hosts(2) as made:
        meeting = ["--nnodes", "2", "--rdzv-endpoint", f"{made[0].address}:29400"]
        nodes = [
            Node(
                tmp_path / host.name,
                [*meeting, "--node-rank", str(rank), script, "-"],
                before=host.command(),
                environ={"ECHELON_SECRET": "a-secret-of-the-tests", "GLOO_SOCKET_IFNAME": "eth0"},
            )
            for rank, host in enumerate(made)
        ]
        try:
            codes = [node.end() for node in nodes]
        finally:
            for node in nodes:
                node.close()
    assert codes == [0, 0], [node.lines for node in nodes]
    for node in nodes:
        assert sum("sum True" in line for line in node.lines) == 1, node.lines


_PIPES = {"TORCH_NCCL_DEBUG_INFO_PIPE_FILE", "TORCH_FR_DEBUG_INFO_PIPE_FILE"}


def test_what_the_user_has_set_stays(tmp_path):
    mine = {
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "/x/mine_",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
        "TORCH_NCCL_TRACE_BUFFER_SIZE": "9",
    }
    assert set(torch_environment(mine, tmp_path)) == _PIPES


@pytest.mark.parametrize(
    ("version", "names"),
    [
        (
            (2, 5),
            {
                "TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE",
                "TORCH_NCCL_TRACE_BUFFER_SIZE", "TORCH_NCCL_DUMP_ON_TIMEOUT",
            },
        ),
        (
            (2, 13),
            {"TORCH_FR_DUMP_TEMP_FILE", "TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_DUMP_ON_TIMEOUT"},
        ),
        (
            (2, 15),
            {"TORCH_FR_DUMP_TEMP_FILE", "TORCH_FR_BUFFER_SIZE", "TORCH_FR_DUMP_ON_TIMEOUT"},
        ),
        ((), {"TORCH_FR_DUMP_TEMP_FILE", "TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_DUMP_ON_TIMEOUT"}),
    ],
)  # fmt: skip
def test_each_torch_gets_the_names_it_reads(tmp_path, version, names):
    chosen = torch_environment({}, tmp_path, version)
    assert set(chosen) == names | _PIPES | {"TORCHCOMM_FR_DUMP_TEMP_FILE"}


@pytest.mark.parametrize("flag", ["1", "true", "0"])
def test_a_dump_with_a_name_of_its_own_is_found(tmp_path, flag):
    environ = {"RANK": "3", "TORCH_FR_DUMP_DYNAMIC_FILE_NAME": flag}
    environ |= torch_environment(environ, tmp_path)
    assert dump_path(environ, 3) == tmp_path / "torch_dump_3"
    written = environ["TORCH_FR_DUMP_TEMP_FILE"] + ("" if flag != "0" else "3")
    assert written == str(dump_path(environ, 3)), "where torch writes"


def test_a_name_that_all_ranks_share_is_no_ranks_dump(tmp_path):
    environ = {"TORCH_FR_DUMP_DYNAMIC_FILE_NAME": "1", "TORCH_FR_DUMP_TEMP_FILE": "/x/trace"}
    assert dump_path(environ, 0) is None


def test_an_old_dump_at_the_users_place_is_not_ours(tmp_path):
    environ = {"TORCH_FR_DUMP_TEMP_FILE": f"{tmp_path}/trace_"}
    path = tmp_path / "trace_4"
    path.write_bytes(b"of last week")
    dump = TorchDump(environ, 4)
    dump.look()
    dump.look()
    assert (dump.num_own, dump.read()) == (0, b"")
    path.write_bytes(b"of this job, and longer")
    dump.look()
    assert dump.num_own == 0, "it may still grow"
    dump.look()
    assert (dump.num_own, dump.read()) == (1, b"of this job, and longer")


def test_a_file_in_the_pipes_place_is_not_written_to(tmp_path):
    path = tmp_path / "pipe_0.pipe"
    path.write_bytes(b"mine")
    assert not TorchDump({"TORCH_NCCL_DEBUG_INFO_PIPE_FILE": f"{tmp_path}/pipe_"}, 0).ask()
    assert path.read_bytes() == b"mine"


def test_a_dump_that_was_asked_for_and_comes_late_is_not_torchs_own(tmp_path):
    environ = {
        "TORCH_FR_DUMP_TEMP_FILE": f"{tmp_path}/dump_",
        "TORCH_NCCL_DEBUG_INFO_PIPE_FILE": f"{tmp_path}/pipe_",
    }
    dump = TorchDump(environ, 0)
    assert not dump.ask(), "nobody serves a pipe"
    os.mkfifo(tmp_path / "pipe_0.pipe")
    assert not dump.ask(), "nobody has it open"
    served = os.open(tmp_path / "pipe_0.pipe", os.O_RDONLY | os.O_NONBLOCK)
    try:
        assert dump.ask()
        assert os.read(served, 128) == b"1"
    finally:
        os.close(served)
    assert not dump.has_come()
    (tmp_path / "dump_0").write_bytes(b"late")
    dump.look()
    dump.look()
    assert (dump.num_own, dump.read()) == (0, b"late")
    (tmp_path / "dump_0").write_bytes(b"of its own accord")
    dump.look()
    dump.look()
    assert dump.num_own == 1
    dump.clear_up()
    assert not (tmp_path / "pipe_0.pipe").exists()
