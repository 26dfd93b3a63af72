"""torch's dumps as other jobs write them: active entries only, wrapped, batched, several groups."""

from __future__ import annotations

from pathlib import Path

import pytest
from imagined_torch import TorchJob, TorchRank

from echelon.analysis import analyze
from echelon.analysis.finding import Finding

PP = ("1", "pp")
FORMATS = ("2.3", "2.4", "2.7", "2.9", "2.10")


def verdict_of(job: TorchJob, folder: Path, **how: object) -> Finding | None:
    return analyze(job.write(folder / "dumps", **how)).verdict


def told(verdict: Finding | None) -> tuple[str, list[int]] | None:
    return None if verdict is None else (verdict.cause.value, list(verdict.culprit_ranks))


def counted(entered: int, completed: int) -> dict[str, int]:
    return {
        "last_enqueued_collective": entered,
        "last_started_collective": -1,
        "last_completed_collective": completed,
    }


def only_active(job: TorchJob) -> TorchJob:
    for rank in job.ranks:
        rank.only_active = True
    return job


def exchange(rank: TorchRank, peer: int, state: str = "completed", **how: object) -> None:
    """Send to and receive from a peer in one batch; only its end has a state."""
    rank.send(peer, "scheduled", **how).recv(peer, "scheduled", same_block=True)
    rank.call("coalesced", p2p=True, same_block=True, sizes=[], state=state)


@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize("version", FORMATS)
def test_each_format_shows_the_rank_that_hangs(tmp_path: Path, version: str, as_json: bool) -> None:
    job = TorchJob(4).all_call(5)
    for rank in job.ranks:
        rank.version = version
        if rank.rank != 2:
            rank.call(state="scheduled")
        for entry in rank.entries:
            if version in ("2.3", "2.4"):
                entry.pop("timeout_ms", None)
    assert told(verdict_of(job, tmp_path, as_json=as_json)) == ("host_hang", [2])


# ---- active entries only ----


def test_a_rank_that_lists_nothing_is_behind_by_its_counters(tmp_path: Path) -> None:
    job = only_active(TorchJob(4).all_call(7))
    for rank in job.others(1):
        rank.call(state="scheduled")
    assert told(verdict_of(job, tmp_path)) == ("host_hang", [1])


def test_a_rank_that_lists_nothing_and_has_counted_up_is_through(tmp_path: Path) -> None:
    """Rank 1 alone is still inside what the others completed: its device, not the network."""
    job = only_active(TorchJob(4).all_call(7))
    for rank in job.ranks:
        rank.call(state="scheduled" if rank.rank == 1 else "completed")
        if rank.rank != 1:
            rank.call(state="scheduled")
    assert told(verdict_of(job, tmp_path)) == ("device_stuck", [1])


def test_parts_of_completed_batches_are_not_pending(tmp_path: Path) -> None:
    job = only_active(TorchJob(2).all_call(1))
    for _ in range(3):
        for rank in job.ranks:
            exchange(rank, 1 - rank.rank)
    for rank in job.ranks:
        rank.call(state="completed")
    assert verdict_of(job, tmp_path) is None


def test_status_is_joined_to_a_group_without_entries(tmp_path: Path) -> None:
    """Rank 3 completed all of its own group; its counter says so where its list is empty."""
    job = only_active(TorchJob(4).all_call(3))
    for rank in job.ranks:
        name = "1" if rank.rank < 2 else "2"
        members = [0, 1] if rank.rank < 2 else [2, 3]
        rank.config[name] = {"name": name, "desc": "tp", "ranks": str(members)}
        rank.call(group=(name, "tp"), state="scheduled" if rank.rank == 2 else "completed")
        for entry in rank.entries:
            entry["pg_id"] = 0 if entry["process_group"][0] == "0" else 1
        rank.status = {"0": counted(3, 3), "1": counted(1, 0 if rank.rank == 2 else 1)}
    job[3].call(state="scheduled")
    job[3].status["0"] = counted(4, 3)
    verdict = verdict_of(job, tmp_path)
    assert verdict is not None
    assert 3 not in verdict.culprit_ranks


# ---- moments ----


def test_what_one_completed_and_another_had_not_entered_proves_motion(tmp_path: Path) -> None:
    job = TorchJob(4).all_call(5)
    job[0].call().call(state="scheduled")
    job[1].call(state="scheduled")
    assert verdict_of(job, tmp_path) is None


def test_a_counter_that_lags_behind_hides_no_motion(tmp_path: Path) -> None:
    """Dumps of active entries list no completed ones; the watchdog counts them a moment later."""
    job = only_active(TorchJob(4).all_call(5))
    job[0].call().call(state="scheduled")
    job[0].status = {"0": counted(7, 5)}
    job[1].call(state="scheduled")
    assert verdict_of(job, tmp_path) is None


def test_an_early_end_of_a_broadcasts_root_proves_nothing(tmp_path: Path) -> None:
    job = TorchJob(4).all_call(5)
    job[0].call("broadcast").call(state="scheduled")
    for rank in job.others(0, 2):
        rank.call("broadcast", state="scheduled")
    assert told(verdict_of(job, tmp_path)) == ("host_hang", [2])


# ---- heads of streams ----


def test_all_inside_is_no_network_fault_while_one_is_queued_behind_another(tmp_path: Path) -> None:
    """All ranks enqueued the last all_reduce ahead; rank 3 hangs before its half's own one."""
    job = TorchJob(4).all_call(3)
    for rank in job.ranks:
        name = "1" if rank.rank < 2 else "2"
        members = [0, 1] if rank.rank < 2 else [2, 3]
        rank.config[name] = {"name": name, "desc": "tp", "ranks": str(members)}
        rank.call(group=(name, "tp"))
        if rank.rank != 3:
            rank.call(group=(name, "tp"), state="completed" if rank.rank < 2 else "scheduled")
            rank.call(state="scheduled")
    assert told(verdict_of(job, tmp_path)) == ("host_hang", [3])


def test_a_kernel_that_is_only_scheduled_while_its_peers_run(tmp_path: Path) -> None:
    job = TorchJob(4).all_call(4)
    for rank in job.ranks:
        rank.call(state="scheduled" if rank.rank == 1 else "started")
    assert told(verdict_of(job, tmp_path)) == ("device_stuck", [1])


def test_without_starts_a_scheduled_kernel_accuses_nobody(tmp_path: Path) -> None:
    job = TorchJob(4)
    for rank in job.ranks:
        rank.call(state="scheduled")
    verdict = verdict_of(job, tmp_path)
    assert told(verdict) == ("network", [])
    assert verdict is not None
    assert verdict.confidence.value == "possible"


@pytest.mark.parametrize(
    ("lost", "ranks", "confidence"),
    [
        ((), [0], "certain"),
        ((3,), [0], "likely"),  # it may have called what rank 0 called
        ((2, 3), [0, 1], "possible"),
    ],
)
def test_a_vote_is_as_sure_as_the_ranks_that_are_missing_allow(
    tmp_path: Path, lost: tuple[int, ...], ranks: list[int], confidence: str
) -> None:
    job = TorchJob(4).all_call(2)
    job[0].call("broadcast", state="started", line=11)
    for rank in job.others(0):
        rank.call(state="started", line=11)
    verdict = verdict_of(job, tmp_path, lost=lost)
    assert told(verdict) == ("op_mismatch", ranks)
    assert verdict is not None
    assert verdict.confidence.value == confidence


def test_a_ring_of_two_blames_neither_because_a_record_is_missing(tmp_path: Path) -> None:
    """Rank 1 receives from the wrong peer; the dump of rank 0, which sends to it, is missing."""
    job = TorchJob(4).all_call(1, line=10).all_call(1, line=11)
    job[1].recv(2, "started", line=12)
    for rank in job.others(0, 1):
        rank.call(state="started", line=12)
    verdict = verdict_of(job, tmp_path, lost=(0,))
    assert told(verdict) == ("order_desync", [1, 2])
    assert verdict is not None
    assert verdict.confidence.value == "possible"


def reduced(state: str) -> TorchJob:
    """Ranks 1 and 3 are through as senders of a reduce; 0, its root, waits for rank 2."""
    job = TorchJob(4).all_call(2)
    job[0].call("reduce", state="started")
    job[2].call("reduce", state=state)
    for rank in (job[1], job[3]):
        rank.call("reduce").call("broadcast", state="started")
    return job


def test_the_root_of_a_reduce_is_not_blamed_for_a_sender_that_never_started(tmp_path: Path) -> None:
    verdict = verdict_of(reduced("scheduled"), tmp_path)
    assert told(verdict) == ("device_stuck", [2])
    assert verdict is not None
    assert verdict.confidence.value == "likely"


def test_root_and_sender_are_both_open_where_both_have_started(tmp_path: Path) -> None:
    verdict = verdict_of(reduced("started"), tmp_path)
    assert told(verdict) == ("device_stuck", [0, 2])
    assert verdict is not None
    assert verdict.confidence.value == "possible"
    assert any("is the root" in line for line in verdict.would_settle)


# ---- pairs ----


@pytest.mark.parametrize(
    ("changes", "cause"),
    [({"sizes": [[9, 4]]}, "shape_mismatch"), ({"dtype": "Half"}, "dtype_mismatch")],
)
def test_one_pair_of_a_batch_that_differs(
    tmp_path: Path, changes: dict[str, object], cause: str
) -> None:
    job = TorchJob(2).all_call(1)
    for _ in range(2):
        for rank in job.ranks:
            exchange(rank, 1 - rank.rank)
    exchange(job[0], 1, "scheduled", **changes)
    exchange(job[1], 0, "scheduled")
    verdict = verdict_of(job, tmp_path)
    assert told(verdict) == (cause, [0])
    assert verdict is not None
    assert verdict.confidence.value == "likely"


def test_both_are_named_where_nothing_shows_which_side_is_odd(tmp_path: Path) -> None:
    job = TorchJob(2).all_call(1)
    exchange(job[0], 1, "scheduled", sizes=[[9, 4]])
    exchange(job[1], 0, "scheduled")
    assert told(verdict_of(job, tmp_path)) == ("shape_mismatch", [0, 1])


def buffered(**odd: object) -> TorchJob:
    """Rank 0 is through with a small message that rank 1 never receives; rank 2 waits for both."""
    job = TorchJob(3).all_call(1)
    for _ in range(3):
        job[0].send(1)
        job[1].recv(0)
    job[0].send(1, **odd).call(state="scheduled")
    job[1].recv(0, "scheduled")
    job[2].call(state="scheduled")
    return job


@pytest.mark.parametrize(
    ("odd", "cause"),
    [({"sizes": [[9, 4]]}, "shape_mismatch"), ({"dtype": "Half"}, "dtype_mismatch")],
)
def test_a_message_that_left_its_sender_and_fits_no_receive(
    tmp_path: Path, odd: dict[str, object], cause: str
) -> None:
    verdict = verdict_of(buffered(**odd), tmp_path)
    assert told(verdict) == (cause, [0])
    assert verdict is not None
    assert verdict.confidence.value == "likely"


def test_a_message_that_left_its_sender_and_fits_is_on_its_way(tmp_path: Path) -> None:
    verdict = verdict_of(buffered(), tmp_path)
    assert verdict is None or not verdict.cause.value.endswith("mismatch")


# ---- sizes that no vote can see ----


@pytest.mark.parametrize("operation", ["_all_gather_base", "_reduce_scatter_base"])
def test_an_output_that_fits_its_input_on_no_rank(tmp_path: Path, operation: str) -> None:
    job = TorchJob(4).all_call(2)
    for rank in job.ranks:
        rank.call(operation, sizes=[[8]], outputs=[[9]], state="scheduled")
    verdict = verdict_of(job, tmp_path)
    assert told(verdict) == ("shape_mismatch", [0, 1, 2, 3])
    assert verdict is not None
    assert "the others" not in verdict.summary
    assert "4 times" in verdict.summary


def test_sizes_that_fit_are_not_reported(tmp_path: Path) -> None:
    job = TorchJob(4).all_call(2)
    for rank in job.ranks:
        rank.call("_all_gather_base", sizes=[[8]], outputs=[[32]])
        rank.call("_reduce_scatter_base", sizes=[[32]], outputs=[[8]])
    assert verdict_of(job, tmp_path) is None
