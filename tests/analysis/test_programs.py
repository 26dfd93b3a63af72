"""Ranks of one program side by side, in torch's dumps: which one left it, and by what."""

from __future__ import annotations

from pathlib import Path

import pytest
from imagined_torch import TorchJob, TorchRank

from echelon.analysis import analyze
from echelon.analysis.finding import Finding

DEPTH = 3  # collectives of a step within a pair


def verdict_of(job: TorchJob, folder: Path) -> Finding:
    verdict = analyze(job.write(folder / "dumps")).verdict
    assert verdict is not None
    return verdict


def told(verdict: Finding) -> tuple[str, list[int], str]:
    return verdict.cause.value, list(verdict.culprit_ranks), verdict.confidence.value


def grid(size: int = 8) -> TorchJob:
    """Make ranks in pairs (tp) and across them (dp)."""
    job = TorchJob(size)
    for rank in job.ranks:
        pair = [rank.rank - rank.rank % 2, rank.rank - rank.rank % 2 + 1]
        across = list(range(rank.rank % 2, size, 2))
        rank.config["1"] = {"name": "1", "desc": "tp", "ranks": str(pair)}
        rank.config["2"] = {"name": "2", "desc": "dp", "ranks": str(across)}
    return job


def grid_step(rank: TorchRank, *, num_tp: int = DEPTH, states: tuple[str, ...] = ()) -> None:
    """Call a step; `states` are those of its last calls, and what follows the last is not called.

    The lines tell a call's place; no signature does.
    """
    calls = [(("1", "tp"), 50 + at) for at in range(DEPTH - num_tp, DEPTH)]
    calls += [(("2", "dp"), 60), (("0", "default_pg"), 70)]
    states = states or ("completed",) * len(calls)
    for (group, line), state in zip(calls, states, strict=False):
        rank.call(group=group, line=line, state=state)


def test_a_collective_left_out_where_no_signature_shows_it(tmp_path: Path) -> None:
    """Rank 1 is one short in its pair, so that all wait for each other in a ring of three groups.

    Its own group pairs its second call with the first of rank 0: nothing there differs in size.
    """
    job = grid()
    for rank in job.ranks:
        grid_step(rank)
    done, open_ = ("completed",), ("scheduled",)
    for rank in job.ranks:
        if rank.rank == 1:
            grid_step(rank, num_tp=DEPTH - 1, states=done * (DEPTH - 1) + done + open_)
        elif rank.rank == 0:
            grid_step(rank, states=done * (DEPTH - 1) + open_)
        elif rank.rank % 2:
            grid_step(rank, states=done * DEPTH + done + open_)
        else:
            grid_step(rank, states=done * DEPTH + open_)
    verdict = verdict_of(job, tmp_path)
    assert told(verdict) == ("skipped_collective", [1], "likely")
    assert "skipped all_reduce of group 'tp' at train.py:50" in verdict.summary


def test_two_calls_in_another_order_than_the_ranks_of_the_same_program(tmp_path: Path) -> None:
    job = grid()
    for _ in range(2):
        for rank in job.ranks:
            grid_step(rank)
    tp, dp = ("1", "tp"), ("2", "dp")
    for rank in job.ranks:
        order = [(dp, 60), (tp, 50)] if rank.rank == 3 else [(tp, 50), (dp, 60)]
        waits = rank.rank in (2, 3) or rank.rank % 2
        for group, line in order:
            state = "scheduled" if waits and (group == dp or rank.rank in (2, 3)) else "completed"
            rank.call(group=group, line=line, state=state)
    verdict = verdict_of(job, tmp_path)
    assert told(verdict) == ("order_desync", [3], "likely")


def ring_step(rank: TorchRank, *, rounds: int = 3) -> None:
    for _ in range(rounds):
        rank.send((rank.rank + 1) % 4, "scheduled", line=100)
        rank.recv((rank.rank - 1) % 4, "scheduled", same_block=True, line=100)
        rank.call("coalesced", p2p=True, same_block=True, sizes=[], line=100)
    rank.call(line=101)
    rank.call(line=102)


def into_ring(rank: TorchRank) -> None:
    rank.send((rank.rank + 1) % 4, "scheduled", line=100)
    rank.recv((rank.rank - 1) % 4, "scheduled", same_block=True, line=100)
    rank.call("coalesced", p2p=True, same_block=True, sizes=[], line=100, state="scheduled")


def test_a_rank_that_is_in_a_message_may_have_left_out_a_collective(tmp_path: Path) -> None:
    """Rank 3 is in the ring of the next step; the others wait for its second all_reduce."""
    job = TorchJob(4)
    for rank in job.ranks:
        for _ in range(4):
            ring_step(rank)
        rank.entries.pop()
        rank.counts["0"][0] -= 1
    for rank in job.others(3):
        rank.call(line=102, state="scheduled")
    into_ring(job[3])
    verdict = verdict_of(job, tmp_path)
    assert told(verdict) == ("skipped_collective", [3], "likely")


def test_programs_that_part_by_intent_accuse_no_rank(tmp_path: Path) -> None:
    """Rank 0 alone calls a second barrier at the end, which no rank called before: a hang."""
    job = TorchJob(4)
    for rank in job.ranks:
        for _ in range(3):
            rank.call(line=20).call(line=21)
    for rank in job.others(2):
        rank.call("barrier", line=30, state="scheduled")
    verdict = verdict_of(job, tmp_path)
    assert (verdict.cause.value, verdict.culprit_ranks) == ("host_hang", (2,))


def test_a_short_history_singles_out_no_rank(tmp_path: Path) -> None:
    """Two stages send to each other, in their first step: neither left its habit."""
    job = TorchJob(3)
    job[0].send(1, line=81).send(1, line=81)
    job[1].recv(0, line=80).send(2, line=81).recv(0, line=80).send(2, "scheduled", line=81)
    job[2].recv(1, line=80).send(1, "scheduled", line=83)
    verdict = verdict_of(job, tmp_path)
    assert verdict.confidence.value == "possible"


def test_an_input_that_misfits_on_one_rank_names_that_rank(tmp_path: Path) -> None:
    job = TorchJob(4).all_call(2)
    for rank in job.ranks:
        size = 9 if rank.rank == 2 else 8
        rank.call("_all_gather_base", sizes=[[size]], outputs=[[32]], state="scheduled")
    assert told(verdict_of(job, tmp_path)) == ("shape_mismatch", [2], "likely")


@pytest.mark.parametrize("operation", ["_allgather_base", "some_new_operation"])
def test_names_of_other_versions_take_part_in_the_vote(tmp_path: Path, operation: str) -> None:
    job = TorchJob(4).all_call(2)
    for rank in job.ranks:
        rank.call(operation, dtype="Half" if rank.rank == 1 else "Float", state="scheduled")
    assert told(verdict_of(job, tmp_path)) == ("dtype_mismatch", [1], "certain")


def test_a_later_message_that_is_through_completes_no_earlier_one(tmp_path: Path) -> None:
    """Messages of two directions have streams of their own; the counter is that of the last."""
    job = TorchJob(3)
    for rank in job.ranks:
        rank.config["1"] = {"name": "1", "desc": "pp", "ranks": "[0, 1, 2]"}
    pp = ("1", "pp")
    for _ in range(3):
        job[0].send(1, group=pp)
        job[1].recv(0, group=pp).send(2, group=pp)
        job[2].recv(1, group=pp)
    job[0].send(1, group=pp).send(1, "scheduled", group=pp)
    job[1].send(2, "scheduled", group=pp).recv(0, group=pp)
    for rank in job.ranks:
        last = rank.counts["1"][1]
        rank.status = {
            "1": {
                "last_enqueued_collective": last,
                "last_started_collective": -1,
                "last_completed_collective": last,
            }
        }
    verdict = verdict_of(job, tmp_path)
    assert (verdict.cause.value, verdict.culprit_ranks) == ("host_hang", (2,))


def test_a_message_in_a_list_of_active_ones_is_pending_whatever_is_through(tmp_path: Path) -> None:
    """Rank 1's send is listed because it is active; its later receive, which is not, came first."""
    job = TorchJob(3)
    for rank in job.ranks:
        rank.only_active = True
        rank.config["1"] = {"name": "1", "desc": "pp", "ranks": "[0, 1, 2]"}
    pp = ("1", "pp")
    job[0].send(1, group=pp).send(1, "scheduled", group=pp)
    job[1].send(2, "scheduled", group=pp).recv(0, group=pp)
    for rank, last in ((job[0], 2), (job[1], 2), (job[2], 0)):
        rank.status = {
            "1": {
                "last_enqueued_collective": last,
                "last_started_collective": -1,
                "last_completed_collective": last,
            }
        }
    verdict = verdict_of(job, tmp_path)
    assert (verdict.cause.value, verdict.culprit_ranks) == ("host_hang", (2,))


def test_a_ring_of_many_ranks_is_not_certain(tmp_path: Path) -> None:
    """In lists of active entries nothing shows which of the ranks on the ring slipped."""
    job = grid()
    for rank in job.ranks:
        rank.only_active = True
        grid_step(rank)
    for rank in job.ranks:
        if rank.rank % 2:
            rank.call(line=70, state="scheduled")
        elif rank.rank == 0:
            rank.call(group=("1", "tp"), line=52, state="scheduled")
        else:
            rank.call(group=("2", "dp"), line=60, state="scheduled")
    verdict = verdict_of(job, tmp_path)
    assert verdict.cause.value == "order_desync"
    assert verdict.confidence.value != "certain"
    assert "completed before" in verdict.would_settle[0]
