"""Logs alone: known messages, whose trouble was its own, and what no log can show."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from echelon.analysis import cli
from echelon.analysis.diagnose import analyze
from echelon.analysis.finding import Cause, Confidence, Finding
from echelon.analysis.sources.logs.endings import endings_in
from echelon.analysis.sources.logs.lines import FIRST_BYTES, LAST_BYTES, by_rank
from echelon.analysis.sources.logs.messages import MESSAGES, Role, messages_in
from echelon.errors import DumpFormatError
from tests.analysis.imagined_job import Job

# name of the message -> lines as the libraries, drivers and schedulers write them
SAMPLES: dict[str, list[str]] = {
    "xid-45": ["NVRM: Xid (PCI:0000:3b:00): 45, pid=4711, name=python, Ch 00000008"],
    "xid-program": ["[812.4] NVRM: Xid (PCI:0000:3b:00): 31, pid=4711, MMU Fault: ENGINE GRAPHICS"],
    "xid": ["NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', GPU has fallen off the bus."],
    "ecc": ["RuntimeError: CUDA error: uncorrectable ECC error encountered"],
    "nvlink": ["CUDA error: uncorrectable NVLink error detected during the execution"],
    "off-the-bus": [
        "Unable to determine the device handle for GPU 0000:3B:00.0: GPU is lost.",
        "RuntimeError: level_zero backend failed with error: 20 (UR_RESULT_ERROR_DEVICE_LOST)",
        "RuntimeError: CUDA error: all CUDA-capable devices are busy or unavailable",
    ],
    "fabric-manager": ["RuntimeError: CUDA error: system not yet initialized"],
    "kernel-oom": [
        "Memory cgroup out of memory: Killed process 4711 (python) total-vm:81234kB",
        "slurmstepd: error: Detected 1 oom_kill event in StepId=99.0. Some of the step tasks have",
        "oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=/",
        "srun: error: node07: task 5: Out Of Memory",
    ],
    "device-oom": [
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a",
        "transport/p2p.cc:288 NCCL WARN Cuda failure 2 'out of memory'",
    ],
    "shared-memory": [
        ("ERROR: Unexpected bus error encountered in worker. This might be caused by insufficient "
        "shared memory (shm)."),
        "RuntimeError: unable to write to file </torch_4711_2042>",
        ("RuntimeError: unable to allocate shared memory(shm) for file </torch_26_39_0>: No space "
        "left on device (28)"),
    ],
    "loader-killed": ["RuntimeError: DataLoader worker (pid 4712) is killed by signal: Killed."],
    "loader-died": ["RuntimeError: DataLoader worker (pid(s) 4712, 4713) exited unexpectedly"],
    "illegal-access": [
        "RuntimeError: CUDA error: an illegal memory access was encountered",
        "Memory access fault by GPU node-4 (Agent handle: 0x55) on address 0x7f. Reason: Unknown.",
    ],
    "duplicate-gpu": ["Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1000"],
    "no-such-device": ["RuntimeError: CUDA error: invalid device ordinal"],
    "driver-version": ["CUDA error: no kernel image is available for execution on the device"],
    "mismatch": [
        ("RuntimeError: Detected mismatch between collectives on ranks. Rank 0 is running "
        "collective: CollectiveFingerPrint(SequenceNumber=5, OpType=ALLREDUCE"),
    ],
    "no-interface": [
        ("n1:4711:4711 [0] bootstrap.cc:45 NCCL WARN Bootstrap : no socket interface "
        "found"),
    ],
    "ib-port": [
        ("n1:4711:4790 [0] misc/ibvwrap.cc NCCL WARN NET/IB : mlx5_0:1 Got async event : "
        "port error"),
    ],
    "address-in-use": [
        ("The server socket has failed to listen on any local network address. port: 29500, "
        "useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use"),
    ],
    "disk-full": ["OSError: [Errno 28] No space left on device: '/scratch/step_100'"],
    "storage": ["OSError: [Errno 116] Stale file handle: '/data/shard_7.bin'"],
    "descriptors": ["OSError: [Errno 24] Too many open files: '/data/a'"],
    "crash": [
        "Fatal Python error: Segmentation fault", ("*** SIGBUS received at time=1700 on "
        "cpu 3"),
    ],
    "node-failure": ["srun: error: Node failure on node07"],
    "scheduler": [
        ("slurmstepd: error: *** STEP 99.0 ON n1 CANCELLED AT 2026-01-02T03:04:05 DUE TO "
        "TIME LIMIT ***"),
    ],
    "watchdog": [
        ("[E102 ProcessGroupNCCL.cpp:616] [Rank 1] Watchdog caught collective operation timeout: "
        "WorkNCCL(SeqNum=6, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran for"),
    ],
    "ib-retries": [
        ("NCCL WARN NET/IB : Got completion from peer 10.0.0.1<4791> with status=12 "
        "opcode=0 len=0"),
    ],
    "nccl-remote": [
        ("ncclRemoteError: A call failed possibly due to a network error or a remote "
        "process"),
    ],
    "connection-lost": [
        ("RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection "
        "closed by peer [127.0.0.1]:29342"),
        "misc/socket.cc:58 NCCL WARN socketStartConnect: Connect to 10.0.0.2<4791> failed",
    ],
    "gloo-timeout": [
        ("[/p/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1800000ms for "
        "recv"),
    ],
    "monitored-barrier": ["RuntimeError: Ranks 1, 3 failed to pass monitoredBarrier in 30000 ms"],
    "clients-missing": [
        ("torch.distributed.DistStoreError: Timed out after 301 seconds waiting for "
        "clients. 3/4 clients joined."),
    ],
    "store-unreachable": [
        ("The client socket has timed out after 60000ms while trying to connect to (n1, "
        "29500)."),
    ],
    "store-timeout": [
        ("torch.distributed.DistStoreError: wait timeout after 600000ms, keys: "
        "/default_pg/0//cuda//0"),
    ],
    "terminated": [
        ("W1122 torch/distributed/elastic/agent/server/api.py:704] Received "
        "Signals.SIGTERM death signal"),
    ],
}  # fmt: skip

OWN = """step 11 loss 2.31
Traceback (most recent call last):
  File "/job/train.py", line 88, in <module>
    main()
  File "/job/train.py", line 41, in main
    raise ValueError("bad batch")
ValueError: bad batch
"""
LOST = """step 11 loss 2.31
[rank{rank}]: Traceback (most recent call last):
[rank{rank}]:   File "/job/train.py", line 50, in main
[rank{rank}]:     dist.all_reduce(x)
[rank{rank}]:   File "/v/torch/distributed/distributed_c10d.py", line 2501, in all_reduce
[rank{rank}]:     work.wait()
[rank{rank}]: RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:29342
"""  # noqa: E501
WATCHDOG = (
    "[rank{rank}]:[E102 10:11:12.5 ProcessGroupNCCL.cpp:616] [Rank {rank}] Watchdog caught "
    "collective operation timeout: WorkNCCL(SeqNum={number}, OpType={kind}, NumelIn=1, NumelOut=1, "
    "Timeout(ms)=600000) ran for 600029 milliseconds before timing out.\n"
)
TORCHRUN = """E1122 elastic/multiprocessing/api.py:874] failed (exitcode: {code}) local_rank: {rank}
============================================================
train.py FAILED
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-11-22_10:11:12
  host      : n1
  rank      : {rank} (local_rank: {rank})
  exitcode  : {code} (pid: 4711)
  error_file: <N/A>
  traceback : Signal 9 (SIGKILL) received by PID 4711
============================================================
"""


def verdict(folder: Path) -> Finding:
    report = analyze(folder)
    assert report.verdict is not None
    return report.verdict


def write(folder: Path, texts: dict[int, str], job: str = "") -> Path:
    for rank, text in texts.items():
        (folder / f"rank_{rank}.log").write_text(text)
    if job:
        (folder / "launcher.log").write_text(job)
    return folder


@pytest.mark.parametrize("name", [message.name for message in MESSAGES])
def test_each_message_is_known_by_lines_that_are_really_written(name):
    lines = SAMPLES[name]
    text = "step 1 loss 2.3\n" + "\nstep 2 loss 2.2\n".join(lines) + "\n"
    assert [one.message.name for one in messages_in(text)] == [name] * len(lines)


def test_lines_of_training_hold_no_message():
    lines = [
        "step 100 loss 2.3141 grad norm 0.71 12.1k tokens/s memory 61.2 GiB",
        "eval: error rate 0.31, timeout budget left 12 s",
        "loading checkpoint shards: 100%|##########| 12/12 [00:03<00:00, 3.4it/s]",
        "NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [RO]; OOB eth0:10.0.0.1<0>",
        "UserWarning: torch.cuda.amp.autocast(args...) is deprecated",
    ]
    assert list(messages_in("\n".join(lines))) == []


def test_an_exception_of_ones_own_is_told_from_those_that_followed(tmp_path):
    write(tmp_path, {0: LOST.format(rank=0), 1: LOST.format(rank=1), 2: OWN})
    found = verdict(tmp_path)
    assert (found.cause, found.culprit_ranks) == (Cause.EXCEPTION, (2,))
    assert "train.py:41 in main" in found.summary
    assert "ValueError: bad batch" in found.summary
    assert found.fallout_ranks == (0, 1)
    assert found.confidence is Confidence.LIKELY, "no launcher said how rank 2 ended"


def test_what_a_launcher_says_of_the_end_makes_it_certain(tmp_path):
    job = TORCHRUN.format(rank=2, code=1)
    write(tmp_path, {0: LOST.format(rank=0), 1: LOST.format(rank=1), 2: OWN}, job)
    found = verdict(tmp_path)
    assert (found.culprit_ranks, found.confidence) == ((2,), Confidence.CERTAIN)
    assert "rank 2 ended with exit code 1" in found.evidence


def test_a_rank_that_was_killed_is_named_by_the_launcher(tmp_path):
    texts = {rank: LOST.format(rank=rank) for rank in (0, 1, 2)} | {3: "step 11\n"}
    write(tmp_path, texts, TORCHRUN.format(rank=3, code=-9))
    found = verdict(tmp_path)
    assert (found.cause, found.culprit_ranks) == (Cause.DEAD_PROCESS, (3,))
    assert "by SIGKILL" in found.summary


def test_a_rank_that_said_nothing_is_suspected_where_all_others_lost_a_peer(tmp_path):
    write(tmp_path, {r: LOST.format(rank=r) for r in (0, 1, 2)} | {3: ""})
    found = verdict(tmp_path)
    assert (found.cause, found.culprit_ranks) == (Cause.DEAD_PROCESS, (3,))
    assert found.confidence is Confidence.LIKELY
    assert analyze(tmp_path).ranks_missing == (), "its log is there, and empty"


def test_a_watchdog_blames_nobody_who_wrote_its_message(tmp_path):
    told = {r: WATCHDOG.format(rank=r, number=6, kind="ALLREDUCE") for r in (0, 1, 3)}
    write(tmp_path, told | {2: "step 11 loss 2.3\n"})
    found = verdict(tmp_path)
    assert (found.cause, found.culprit_ranks) == (Cause.HOST_HANG, (2,))
    assert found.confidence is not Confidence.CERTAIN


def test_all_watchdogs_alike_single_out_no_rank(tmp_path):
    write(tmp_path, {r: WATCHDOG.format(rank=r, number=6, kind="ALLREDUCE") for r in range(4)})
    found = verdict(tmp_path)
    assert (found.culprit_ranks, found.confidence) == ((), Confidence.POSSIBLE)


def test_a_rank_whose_watchdog_gave_up_elsewhere_is_apart(tmp_path):
    told = {r: WATCHDOG.format(rank=r, number=6, kind="ALLREDUCE") for r in (0, 1, 3)}
    write(tmp_path, told | {2: WATCHDOG.format(rank=2, number=6, kind="BROADCAST")})
    found = verdict(tmp_path)
    assert found.culprit_ranks == (2,)
    assert "another operation" in found.summary


def test_the_kernels_kill_finds_its_rank_by_the_pid_that_nccl_wrote(tmp_path):
    texts = {
        rank: f"n1:47{rank}:47{rank} [0] NCCL INFO comm 0x5 rank {rank} nranks 3 cudaDev 0\n"
        for rank in range(3)
    }
    job = "Memory cgroup out of memory: Killed process 471 (python) total-vm:9kB\n"
    write(tmp_path, texts, job)
    found = verdict(tmp_path)
    assert (found.cause, found.culprit_ranks) == (Cause.OUT_OF_MEMORY, (1,))


def test_the_scheduler_names_tasks(tmp_path):
    job = "srun: error: n2: tasks 4-5: Killed\nsrun: error: n1: task 0: Exited with exit code 1\n"
    assert [(one.rank, one.code) for one in endings_in(job)[0]] == [(4, -9), (5, -9), (0, 1)]
    (tmp_path / "slurm-99.out").write_text("srun: error: n2: task 5: Out Of Memory\n")
    found = verdict(tmp_path)
    assert (found.cause, found.culprit_ranks) == (Cause.OUT_OF_MEMORY, (5,))


def test_what_concerns_no_rank_in_particular_names_none(tmp_path):
    job = "NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off the bus.\n"
    write(tmp_path, {0: "step 1\n", 1: "step 1\n"}, job)
    found = verdict(tmp_path)
    assert (found.cause, found.culprit_ranks) == (Cause.DEVICE_STUCK, ())
    assert "Xid" in found.summary


def test_memory_comes_before_the_exception_that_it_leads_to(tmp_path):
    memory = OWN.replace(
        "ValueError: bad batch",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
    )
    write(tmp_path, {0: OWN, 1: memory})
    found = verdict(tmp_path)
    assert (found.cause, found.culprit_ranks) == (Cause.OUT_OF_MEMORY, (1,))
    assert found.confidence is Confidence.POSSIBLE, "rank 0 had trouble of another kind"


def test_the_same_exception_on_all_ranks_names_all(tmp_path):
    write(tmp_path, dict.fromkeys(range(4), OWN))
    assert verdict(tmp_path).culprit_ranks == (0, 1, 2, 3)


def test_an_exception_that_python_ignored_ended_nothing(tmp_path):
    ignored = "Exception ignored in: <function A.__del__ at 0x7f>\n" + OWN.partition("\n")[2]
    write(tmp_path, {0: ignored, 1: "step 1\n"})
    assert verdict(tmp_path).cause is Cause.UNKNOWN


def test_quiet_logs_are_not_called_healthy(tmp_path):
    write(tmp_path, dict.fromkeys(range(2), "step 1 loss 2.3\nstep 2 loss 2.2\n"))
    report = analyze(tmp_path)
    assert not report.healthy
    assert report.verdict.cause is Cause.UNKNOWN
    assert report.verdict.confidence is Confidence.POSSIBLE


def test_one_merged_log_is_divided_by_the_ranks_that_its_lines_name(tmp_path):
    lines = [f"[default{r}]:{line}" for r in (0, 1) for line in LOST.format(rank=r).splitlines()]
    lines += [f"[default2]:{line}" for line in OWN.splitlines()]
    log = tmp_path / "job.log"
    log.write_text("\n".join(lines) + "\n")
    found = verdict(log)
    assert (found.cause, found.culprit_ranks) == (Cause.EXCEPTION, (2,))


@pytest.mark.parametrize("label", ["{}: ", "{}| ", "n1 {}| "])
def test_labels_of_srun_and_of_ours_name_ranks(tmp_path, label):
    lines = [
        f"{label.format(r)}{line}" for r in (0, 1) for line in LOST.format(rank=r).splitlines()
    ]
    lines += [f"{label.format(2)}{line}" for line in OWN.splitlines()]
    (tmp_path / "slurm-99.out").write_text("\n".join(lines) + "\n")
    assert verdict(tmp_path).culprit_ranks == (2,)


def test_the_folders_of_launchers_are_known_and_the_newest_attempt_counts(tmp_path):
    torchrun = tmp_path / "torchrun"
    for attempt, texts in ((0, {0: OWN, 1: "x\n"}), (1, {0: "y\n", 1: OWN})):
        for rank, text in texts.items():
            folder = torchrun / "none_abc" / f"attempt_{attempt}" / str(rank)
            folder.mkdir(parents=True)
            (folder / "stderr.log").write_text(text)
            (folder / "stdout.log").write_text("")
    assert verdict(torchrun).culprit_ranks == (1,)
    ours = tmp_path / "ours"
    for rank, text in ((0, "x\n"), (1, OWN)):
        folder = ours / f"rank_{rank}" / "attempt_0"
        folder.mkdir(parents=True)
        (folder / "stderr.log").write_text(text)
    assert verdict(ours).culprit_ranks == (1,)


def test_a_world_that_nccl_tells_of_has_ranks_whose_logs_are_missing(tmp_path):
    write(tmp_path, {0: "n1:1:1 [0] NCCL INFO comm 0x5 rank 0 nranks 4 cudaDev 0\nstep\n"})
    assert analyze(tmp_path).ranks_missing == (1, 2, 3)


def test_a_flooded_log_is_read_at_both_ends(tmp_path):
    flood = "x" * 99 + "\n"
    text = OWN + flood * ((FIRST_BYTES + 2 * LAST_BYTES) // 100)
    write(tmp_path, {0: text + "RuntimeError: CUDA error: invalid device ordinal\n", 1: "s\n"})
    found = verdict(tmp_path)
    assert found.culprit_ranks == (0,)
    assert any("ordinal" in line for line in found.evidence)


def test_what_is_no_log_is_left_alone(tmp_path):
    (tmp_path / "core.log").write_bytes(bytes(range(256)) * 10)
    (tmp_path / "model.bin").write_text("Traceback (most recent call last):\n")
    (tmp_path / "rank_3").write_text("")
    (tmp_path / "notes.txt").write_text("We should look at this.\n")
    with pytest.raises((ValueError, DumpFormatError)):
        analyze(tmp_path)


def test_a_hostile_log_neither_moves_the_cursor_nor_grows(tmp_path, capsys):
    evil = (
        "\x1b]0;title\x07RuntimeError: CUDA error: invalid device ordinal \x9b2J\u202e" + "A" * 9999
    )
    write(tmp_path, {0: evil + "\n", 1: f"[rank{10**6}]: x\n"})
    assert cli.main([str(tmp_path)]) == 1
    shown = capsys.readouterr()
    assert not set(shown.out + shown.err) & set("\x1b\x07\x9b\u202e")
    assert analyze(tmp_path).world_size < 10


def test_the_command_prints_a_verdict_of_logs(tmp_path, capsys):
    write(tmp_path, {0: LOST.format(rank=0), 1: OWN})
    assert cli.main([str(tmp_path), "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert (told["verdict"]["cause"], told["verdict"]["culprit_ranks"]) == ("exception", [1])


def test_lines_go_to_the_rank_that_they_name():
    text = "a\n[rank3]: b\n[default4]:c\n[rank5]:[W1 x] d\n"
    assert by_rank(text) == {-1: "a\n", 3: "b\n", 4: "c\n", 5: "[W1 x] d\n"}


def test_every_message_says_what_to_do():
    assert all(one.advice.endswith((".", "?")) for one in MESSAGES)
    assert {one.role for one in MESSAGES} == set(Role)
    assert set(SAMPLES) == {one.name for one in MESSAGES}


def test_a_known_message_is_explained_beside_a_verdict_from_records():
    job = Job(2).train(2)
    job[0].all_reduce()
    job[1].exited(-6, stderr_tail=SAMPLES["illegal-access"][1])
    report = job.report("failure")
    assert report.verdict is not None
    assert report.verdict.culprit_ranks == (1,)
    assert any("AMD_SERIALIZE_KERNEL" in line for line in report.verdict.evidence)


def test_the_docs_name_every_message():
    text = (Path(__file__).parents[2] / "docs" / "logs.md").read_text("utf-8")
    assert [one.name for one in MESSAGES if f"`{one.name}`" not in text] == []


def test_what_a_library_merely_warns_of_is_no_root(tmp_path):
    warning = (
        "[W1122 10:11:12.5 socket.cpp:460] [c10d] The server socket has failed to bind to "
        "[::]:29500 (errno: 98 - Address already in use).\n"
    )
    write(tmp_path, {0: warning + "step 1\n", 1: "UserWarning: no CUDA GPUs are available\n"})
    assert verdict(tmp_path).cause is Cause.UNKNOWN


def test_trouble_after_which_a_rank_went_on_for_long_is_possible_at_most(tmp_path):
    survived = "RuntimeError: CUDA error: invalid device ordinal\n"
    write(tmp_path, {0: survived + "step\n" * 500, 1: "step\n" * 500})
    found = verdict(tmp_path)
    assert (found.culprit_ranks, found.confidence) == ((0,), Confidence.POSSIBLE)
    write(tmp_path, {1: "step\n" * 500 + OWN})
    found = verdict(tmp_path)
    assert (found.cause, found.culprit_ranks) == (Cause.EXCEPTION, (1,))


def test_an_exception_that_was_logged_and_survived_is_possible_at_most(tmp_path):
    write(tmp_path, {0: OWN + "step\n" * 500, 1: "step\n" * 500})
    assert verdict(tmp_path).confidence is Confidence.POSSIBLE


def test_a_traceback_in_a_log_that_names_no_rank_is_an_exception_of_some_rank(tmp_path):
    log = tmp_path / "job.log"
    log.write_text(OWN)
    found = verdict(log)
    assert (found.cause, found.culprit_ranks) == (Cause.EXCEPTION, ())
    assert "train.py:41 in main" in found.summary
