"""Dumps of torch's later recorders: hooks, torchcomms, Gloo with states, unknown peers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from imagined_torch import TorchJob, TorchRank

from echelon.analysis import analyze
from echelon.analysis.finding import Finding
from echelon.analysis.sources.torch.rows import parse_name
from echelon.errors import DumpFormatError

ENQUEUED, STARTED, COMPLETED = (
    f"last_{what}_collective" for what in ("enqueued", "started", "completed")
)


def verdict_of(job: TorchJob, folder: Path, **how: object) -> Finding | None:
    return analyze(job.write(folder / "dumps", **how)).verdict


def told(verdict: Finding | None) -> tuple[str, list[int]] | None:
    return None if verdict is None else (verdict.cause.value, list(verdict.culprit_ranks))


def call_and_forget(rank: TorchRank, operation: str = "all_reduce", **how: object) -> None:
    """Record a call as a hook does whose backend never reports a completion."""
    rank.call(operation, state="scheduled", retired=True, **how)


def hooked(backend: str, world_size: int = 4) -> TorchJob:
    """Return a job whose status counts the operations of all groups, as hooks count them."""
    job = TorchJob(world_size, backend)
    for rank in job.ranks:
        rank.status = {"0": {ENQUEUED: 900 + rank.rank, STARTED: -1, COMPLETED: 900 + rank.rank}}
    return job


# ---- hooks without completions ----


@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize("backend", ["mpi", "ucc", "c10d", "my_plugin"])
def test_calls_without_completions_are_no_timeouts(
    tmp_path: Path, backend: str, as_json: bool
) -> None:
    job = hooked(backend)
    for rank in job.ranks:
        for _ in range(3):
            call_and_forget(rank)
    assert verdict_of(job, tmp_path, as_json=as_json) is None


@pytest.mark.parametrize("as_json", [False, True])
def test_the_rank_that_has_called_fewer_operations_is_the_one_that_hangs(
    tmp_path: Path, as_json: bool
) -> None:
    job = hooked("ucc")
    for rank in job.ranks:
        for _ in range(3 if rank.rank == 2 else 4):
            call_and_forget(rank)
    assert told(verdict_of(job, tmp_path, as_json=as_json)) == ("host_hang", [2])


def test_a_missing_dump_is_suspect_where_completions_are_unknown(tmp_path: Path) -> None:
    job = hooked("ucc")
    for rank in job.ranks:
        for _ in range(3):
            call_and_forget(rank)
    assert told(verdict_of(job, tmp_path, lost=(3,))) == ("dead_process", [3])


def test_calls_that_differ_are_compared_without_completions(tmp_path: Path) -> None:
    job = hooked("ucc")
    for rank in job.ranks:
        call_and_forget(rank)
        call_and_forget(rank, sizes=[[5 if rank.rank == 1 else 4, 4]])
    assert told(verdict_of(job, tmp_path)) == ("shape_mismatch", [1])


def test_an_operation_of_nccl_that_was_retired_unfinished_still_timed_out(tmp_path: Path) -> None:
    job = TorchJob(4).all_call(2)
    for rank in job.others(1):
        rank.call(state="scheduled", retired=True)
    verdict = verdict_of(job, tmp_path)
    assert told(verdict) == ("host_hang", [1])


# ---- hooks with completions ----


@pytest.mark.parametrize("backend", ["nccl2", "rccl"])
def test_the_states_of_backends_with_completions_count(tmp_path: Path, backend: str) -> None:
    job = hooked(backend).all_call(3)
    for rank in job.others(1):
        rank.call(state="scheduled")
    assert told(verdict_of(job, tmp_path)) == ("host_hang", [1])


def test_a_status_that_counts_all_groups_moves_no_rank_ahead(tmp_path: Path) -> None:
    job = hooked("nccl2").all_call(3)
    assert verdict_of(job, tmp_path) is None


# ---- Gloo with states of its own ----


def test_the_states_of_gloo_count_where_it_has_them(tmp_path: Path) -> None:
    job = TorchJob(3, "gloo").all_call(2)
    for rank in job.ranks:
        for entry in rank.entries:
            entry["state"] = "completed"
        if rank.rank != 1:
            rank.call(state="started", retired=False)
            rank.entries[-1]["state"] = "started"
    assert told(verdict_of(job, tmp_path)) == ("host_hang", [1])


def test_an_operation_that_gloo_has_queued_is_pending_and_not_a_device_that_is_stuck(
    tmp_path: Path,
) -> None:
    job = TorchJob(3, "gloo").all_call(2)
    for rank in job.ranks:
        for entry in rank.entries:
            entry["state"] = "completed"
        rank.call(state="x")
        rank.entries[-1]["state"] = "scheduled" if rank.rank == 1 else "started"
    verdict = verdict_of(job, tmp_path)
    assert told(verdict) != ("device_stuck", [1])


# ---- torchcomms ----


def comms(world_size: int = 4, backend: str = "ncclx") -> TorchJob:
    """Return a job of torchcomms: a group is described by its backend."""
    job = TorchJob(world_size, backend)
    for rank in job.ranks:
        rank.config = {"main": describe("main", backend, range(world_size))}
    return job


def describe(name: str, backend: str, ranks: Sequence[int]) -> dict[str, object]:
    return {"name": name, "desc": backend, "ranks": str(list(ranks)).replace(" ", "")}


def in_comm(
    rank: TorchRank, name: str = "main", operation: str = "all_reduce", *, done: bool = True
) -> None:
    """Record an operation as torchcomms does: numbered over all groups, without states."""
    rank.call(operation, group=(name, rank.backend), state="scheduled", retired=done)
    number = len(rank.entries) - 1
    rank.entries[-1] |= {"collective_seq_id": number, "p2p_seq_id": 0, "op_id": number}
    rank.status = {"9": {ENQUEUED: -1, STARTED: -1, COMPLETED: -1}}


@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize("backend", ["ncclx", "rccl", "gloo", "nccl"])
def test_torchcomms_retires_what_completed(tmp_path: Path, backend: str, as_json: bool) -> None:
    job = comms(backend=backend)
    for rank in job.ranks:
        for _ in range(3):
            in_comm(rank)
    assert verdict_of(job, tmp_path / "a", as_json=as_json) is None
    for rank in job.others(2):
        in_comm(rank, done=False)
    assert told(verdict_of(job, tmp_path / "b", as_json=as_json)) == ("host_hang", [2])


def test_torchcomms_numbers_are_those_of_each_group(tmp_path: Path) -> None:
    """Halves call differently often between the collectives of all: no rank is behind."""
    job = comms()
    for rank in job.ranks:
        half = "low" if rank.rank < 2 else "high"
        members = (0, 1) if rank.rank < 2 else (2, 3)
        rank.config[half] = describe(half, "ncclx", members)
        in_comm(rank)
        for _ in range(1 if rank.rank < 2 else 4):
            in_comm(rank, half)
        in_comm(rank)
    assert verdict_of(job, tmp_path / "a") is None
    for rank in job.others(3):
        in_comm(rank, done=False)
    assert told(verdict_of(job, tmp_path / "b")) == ("host_hang", [3])


def test_messages_of_torchcomms_take_no_number_of_a_collective(tmp_path: Path) -> None:
    job = comms(3)
    for rank in job.ranks:
        in_comm(rank)
    in_comm(job[0], operation="send")
    in_comm(job[1], operation="recv")
    for rank in job.ranks:
        in_comm(rank)
    assert verdict_of(job, tmp_path) is None


def test_torchcomms_numbers_that_cannot_be_compared_are_refused(tmp_path: Path) -> None:
    """Its ring has dropped the oldest: how many of them were of which group is not known."""
    job = comms()
    for rank in job.ranks:
        for _ in range(4):
            in_comm(rank)
            in_comm(rank, "other")
        del rank.entries[:3]
    with pytest.raises(DumpFormatError, match="TORCHCOMM_FR_BUFFER_SIZE"):
        verdict_of(job, tmp_path)


# ---- names ----


@pytest.mark.parametrize(
    ("name", "operation", "way", "peer"),
    [
        ("nccl:send 1->2", "send", 1, 2),
        ("nccl2:recv 1<-2", "recv", -1, 2),
        ("nccl2:recv 1<-?", "recv", -1, -1),
        ("ncclx:send", "send", 1, -1),
        ("ncclx:all_gather_single", "all_gather_into_tensor", 0, -1),
        ("cpu_gloo:all_reduce", "all_reduce", 0, -1),
    ],
)
def test_names_of_operations(name: str, operation: str, way: int, peer: int) -> None:
    assert parse_name(name) == (operation, name.partition(":")[0], way, peer)


def test_a_receive_from_any_rank_accuses_no_rank_of_it(tmp_path: Path) -> None:
    job = TorchJob(3, "nccl2").all_call(2)
    job[1].call("recv 1<-?", p2p=True)
    assert verdict_of(job.all_call(1), tmp_path) is None


def test_later_fields_are_skipped(tmp_path: Path) -> None:
    job = TorchJob(3).all_call(2)
    for rank in job.ranks:
        rank.version = "2.17"
        for entry in rank.entries:
            entry |= {"thread_name": "pt_main_thread", "thread_id": "1401", "duration_ms": 0.25}
            entry |= {"stream_id": 7, "hook": {"tier": [1, None, 0.5]}}
    assert verdict_of(job, tmp_path) is None
