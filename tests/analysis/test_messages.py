"""Sends and receives in wrapped rings and active entries: what still proves which rank slipped."""

from __future__ import annotations

from pathlib import Path

import pytest
from imagined_torch import TorchJob, TorchRank

from echelon.analysis import analyze
from echelon.analysis.finding import Finding, Report

PP = ("1", "pp")
TP = ("2", "tp")
CP = ("cafe", "mesh_cp")


def report_of(job: TorchJob, folder: Path) -> Report:
    return analyze(job.write(folder / "dumps"))


def verdict_of(job: TorchJob, folder: Path) -> Finding | None:
    return report_of(job, folder).verdict


def told(verdict: Finding | None) -> tuple[str, list[int], str] | None:
    if verdict is None:
        return None
    return verdict.cause.value, list(verdict.culprit_ranks), verdict.confidence.value


def counted(entered: int, completed: int) -> dict[str, int]:
    return {
        "last_enqueued_collective": entered,
        "last_started_collective": -1,
        "last_completed_collective": completed,
    }


def wrap(job: TorchJob, length: int) -> TorchJob:
    for rank in job.ranks:
        rank.entries = rank.entries[-length:]
    return job


def pass_around(rank: TorchRank, size: int, state: str = "completed", source: int = -1) -> None:
    """Send to the next rank of a ring and receive from the one before, in one batch."""
    after, before = (rank.rank + 1) % size, (rank.rank - 1) % size
    rank.send(after, "scheduled", group=CP)
    rank.recv(before if source < 0 else source, "scheduled", same_block=True, group=CP)
    rank.call("coalesced", p2p=True, same_block=True, sizes=[], state=state, group=CP)


# ---- active entries of a job that moves ----


def ring_attention(*counts: tuple[int, int]) -> TorchJob:
    """Ranks 0 to 2 are inside messages, rank 3 has none pending; collectives are only counted."""
    job = TorchJob(4)
    for rank, (entered, completed) in zip(job.ranks, counts, strict=True):
        rank.only_active = True
        rank.config[CP[0]] = {"name": CP[0], "desc": CP[1], "ranks": "[0, 1, 2, 3]"}
        for _ in range(6):
            pass_around(rank, 4)
        if rank.rank != 3:
            pass_around(rank, 4, "scheduled")
        rank.status = {"0": counted(entered, completed), "9": counted(7, 6)}
    return wrap(job, 12)


def test_counters_of_a_group_without_entries_prove_motion(tmp_path: Path) -> None:
    """Rank 2 is through the world's 8th collective, and rank 0 had not called it."""
    job = ring_attention((7, 6), (7, 6), (8, 7), (8, 7))
    assert verdict_of(job, tmp_path) is None


def test_equal_counters_leave_the_rank_that_hangs(tmp_path: Path) -> None:
    verdict = verdict_of(ring_attention((7, 7), (7, 7), (7, 7), (7, 7)), tmp_path)
    assert verdict is not None
    assert (verdict.cause.value, verdict.culprit_ranks) == ("host_hang", (3,))


def test_counters_of_messages_prove_no_motion(tmp_path: Path) -> None:
    """Ranks 0 and 1 list none of their pipeline's messages, whose numbers differ by rank."""
    job = TorchJob(4)
    for rank in job.ranks:
        rank.only_active = True
        pair = [0, 1] if rank.rank < 2 else [2, 3]
        name = "1" if rank.rank < 2 else "2"
        rank.config[name] = {"name": name, "desc": "pp", "ranks": str(pair)}
        local, sent = rank.rank % 2, 3 if rank.rank % 2 else 6
        for _ in range(sent):
            rank.call(f"send {local}->{1 - local}", p2p=True, group=(name, "pp"))
        if rank.rank > 1:
            way = "send 0->1" if local == 0 else "recv 1<-0"
            rank.call(
                way,
                p2p=True,
                group=(name, "pp"),
                state="scheduled",
                dtype="Half" if local else "Float",
            )
        else:
            rank.call(state="scheduled")
        rank.status = {"0": counted(int(rank.rank < 2), 0), "1": counted(sent, sent)}
        for entry in rank.entries:
            entry["pg_id"] = 0 if entry["process_group"][0] == "0" else 1
    verdict = verdict_of(job, tmp_path)
    assert verdict is not None
    assert (verdict.cause.value, verdict.culprit_ranks) == ("dtype_mismatch", (2, 3))


# ---- a wrong peer ----


def test_a_wrong_peer_in_a_ring_that_has_wrapped(tmp_path: Path) -> None:
    """Rank 2 receives from rank 3, to which it has always sent; rank 1's message waits."""
    job = TorchJob(4)
    for rank in job.ranks:
        rank.config[CP[0]] = {"name": CP[0], "desc": CP[1], "ranks": "[0, 1, 2, 3]"}
        for _ in range(8):
            pass_around(rank, 4)
        pass_around(rank, 4, "scheduled", 3 if rank.rank == 2 else -1)
        pass_around(rank, 4, "scheduled")
    assert told(verdict_of(wrap(job, 18), tmp_path)) == ("p2p_unmatched", [2], "likely")


def pipeline(source: int) -> TorchJob:
    """Of three stages, the middle one receives a gradient from `source` at the line for it."""
    job = TorchJob(3)
    for rank in job.ranks:
        rank.config["1"] = {"name": "1", "desc": "pp", "ranks": "[0, 1, 2]"}
    first, middle, last = job.ranks
    for step in range(4):
        is_now = step == 3
        state = "scheduled" if is_now else "completed"
        first.send(1, group=PP, line=412)
        middle.recv(0, group=PP, line=410)
        middle.send(2, group=PP, line=412)
        last.recv(1, group=PP, line=410)
        last.send(1, state, group=PP, line=432)
        middle.recv(source if is_now else 2, state, group=PP, line=430)
        middle.send(0, state, group=PP, line=432)
        first.recv(1, state, group=PP, line=430)
        for rank in job.ranks:
            rank.call(state=state)
    return job


def test_a_peer_that_is_known_but_never_at_this_line(tmp_path: Path) -> None:
    assert told(verdict_of(pipeline(0), tmp_path)) == ("p2p_unmatched", [1], "likely")


# ---- fewer messages than the ranks that run the same program ----


def stages(*, left_out: int) -> TorchJob:
    """Two stages of two ranks; a rank's ring no longer shows the message that it left out."""
    job = TorchJob(4)
    for rank in job.ranks:
        peer = (rank.rank + 2) % 4
        pair = [0, 2] if rank.rank % 2 == 0 else [1, 3]
        rank.config["1"] = {"name": "1", "desc": "pp", "ranks": str(pair)}
        half = [0, 1] if rank.rank < 2 else [2, 3]
        rank.config["2"] = {"name": "2", "desc": "tp", "ranks": str(half)}
        local = pair.index(peer)
        for step in range(8):
            if step or rank.rank != left_out:
                rank.call(f"send {1 - local}->{local}", p2p=True, group=PP)
            rank.call(f"recv {1 - local}<-{local}", p2p=True, group=PP)
            rank.call(group=TP, line=20)
        rank.call(f"send {1 - local}->{local}", p2p=True, group=PP, state="scheduled")
        rank.call(
            f"recv {1 - local}<-{local}", p2p=True, same_block=True, group=PP, state="scheduled"
        )
        rank.call("coalesced", p2p=True, same_block=True, sizes=[], group=PP, state="scheduled")
        rank.call(group=TP, line=20, state="scheduled")
    return wrap(job, 13)


@pytest.mark.parametrize("left_out", [1, 2])
def test_a_rank_that_launched_fewer_messages_than_its_stage(tmp_path: Path, left_out: int) -> None:
    verdict = verdict_of(stages(left_out=left_out), tmp_path)
    assert verdict is not None
    assert (verdict.cause.value, verdict.culprit_ranks) == ("p2p_unmatched", (left_out,))
    assert "17 and 18" in verdict.summary


def batches(*, left_out: int) -> TorchJob:
    """Two stages of two ranks exchange batches; one rank left a part out of a batch long ago."""
    job = TorchJob(4)
    for rank in job.ranks:
        peer = (rank.rank + 2) % 4
        pair, half = sorted((rank.rank, peer)), [0, 1] if rank.rank < 2 else [2, 3]
        rank.config["1"] = {"name": "1", "desc": "pp", "ranks": str(pair)}
        rank.config["2"] = {"name": "2", "desc": "tp", "ranks": str(half)}
        local = pair.index(peer)
        for step in range(9):
            state = "scheduled" if step == 8 else "completed"
            rank.call(f"recv {1 - local}<-{local}", p2p=True, group=PP, state="scheduled")
            if step or rank.rank != left_out:
                rank.call(
                    f"send {1 - local}->{local}",
                    p2p=True,
                    same_block=True,
                    group=PP,
                    state="scheduled",
                )
            rank.call("coalesced", p2p=True, same_block=True, sizes=[], group=PP, state=state)
            rank.call(group=TP, line=20, state=state)
    return wrap(job, 16)


@pytest.mark.parametrize("left_out", [1, 2])
def test_a_part_that_was_left_out_of_a_batch(tmp_path: Path, left_out: int) -> None:
    """All ranks launched equally many batches: only the count of operations is one short."""
    verdict = verdict_of(batches(left_out=left_out), tmp_path)
    assert verdict is not None
    assert (verdict.cause.value, left_out in verdict.culprit_ranks) == ("p2p_unmatched", True)
    assert set(verdict.culprit_ranks) <= {left_out, left_out ^ 1}


def test_pending_messages_that_nothing_explains_are_not_called_healthy(tmp_path: Path) -> None:
    report = report_of(stages(left_out=-1), tmp_path)
    assert report.verdict is None
    assert report.undecided
    assert report.to_json()["undecided"]
    assert "second set of dumps" in report.findings[0].summary


def test_a_job_that_ended_is_healthy_and_not_undecided(tmp_path: Path) -> None:
    report = report_of(TorchJob(4).all_call(5), tmp_path)
    assert report.healthy
    assert not report.undecided
