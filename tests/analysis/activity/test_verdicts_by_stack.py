"""Unmodified programs, seen by py-spy alone: the verdicts on real stacks, one rank against others.

No ring, no torch dump: what speaks is what the kernel and the stacks show of each process.
"""

from __future__ import annotations

import pytest

from echelon.host.stacks import HOLDS_LOCK
from echelon.recorder.format.schema import HostThread, Socket
from tests.analysis.activity.recorded import recorded
from tests.analysis.imagined_job import Job

_IDLE_GLOO = (HostThread(name="pt_gloo_runloop", call="futex"),)
_BUSY_GLOO = (HostThread(name="pt_gloo_runloop", call="futex", timed=True),)


def job(victims: str, culprit: str, *, gloo: bool = True, **facts: object) -> Job:
    """Ranks 0 and 2 do `victims`, rank 1 does `culprit`."""
    made = Job(3)
    for rank in made.ranks:
        name = culprit if rank.rank == 1 else victims
        its = recorded(name).facts()
        if gloo:
            below = _IDLE_GLOO if rank.rank == 1 else _BUSY_GLOO
            its["threads"] = (*its["threads"], *below)
        rank.has_ring = False
        rank.host.update(its, sockets=(Socket(state="ESTABLISHED"),))
    made[1].host.update(facts)
    return made


@pytest.mark.parametrize("gloo", [True, False], ids=["its threads seen", "threads denied"])
@pytest.mark.parametrize(
    "victims",
    ["all_reduce", "barrier", "fsdp2", "functional", "gather_object", "p2p", "pipelining",
     "tensor_parallel", "work_wait", "dcp_save", "rendezvous"],
)  # fmt: skip
def test_ranks_that_wait_for_peers_are_not_blamed(victims, gloo):
    verdict = job(victims, "sleep", gloo=gloo).report().verdict
    assert (verdict.cause, verdict.culprit_ranks) == ("host_hang", (1,)), verdict
    assert "situations.py:11 in hang" in verdict.summary
    assert verdict.fallout_ranks == (0, 2)


@pytest.mark.parametrize("victims", ["ddp", "compiled_ddp", "async_dcp"])
def test_a_wait_that_only_gloos_threads_show_is_not_blamed(victims):
    verdict = job(victims, "sleep").report().verdict
    assert (verdict.cause, verdict.culprit_ranks) == ("host_hang", (1,)), verdict


def test_nothing_is_certain_where_every_rank_is_named():
    verdict = job("sleep", "sleep", gloo=False).report().verdict
    assert (verdict.culprit_ranks, verdict.confidence) == ((0, 1, 2), "possible"), verdict


@pytest.mark.parametrize(
    ("culprit", "cause", "line"),
    [
        ("loader0", "data_starvation", "situations.py:97 in fetch"),
        ("loader2", "data_starvation", "situations.py:97 in fetch"),
        ("torch_save", "storage_stall", "situations.py:113 in torch_save"),
        ("compile", "compile_stall", "situations.py:122 in backend"),
        ("inductor", "compile_stall", "situations.py:136 in inductor"),
        ("store_wait", "store_wait", "situations.py:86 in store_wait"),
        ("importing", "host_hang", "slow_module.py:2 in <module>"),
        ("lock", "host_hang", "situations.py:139 in lock"),
        ("sub", "host_hang", "situations.py:147 in sub"),
    ],
)
def test_the_culprits_stack_names_cause_and_line(culprit, cause, line):
    verdict = job("all_reduce", culprit).report().verdict
    assert (verdict.cause, verdict.culprit_ranks) == (cause, (1,)), verdict
    assert line in verdict.summary
    assert line in verdict.next_action or cause in ("compile_stall",)


def test_a_loaders_worker_is_named_with_its_pid_and_its_line():
    verdict = job("ddp", "loader2").report().verdict
    pid = recorded("loader2").children[0].pid
    assert verdict.confidence == "certain"
    assert verdict.summary.startswith(
        f"rank 1 waits for its data-loader worker (pid {pid}), which sleeps at situations.py:97 in "
        "fetch"
    )
    assert any("main thread at situations.py:101 in loader2" in line for line in verdict.evidence)


def test_what_only_one_look_saw_is_likely():
    made = job("ddp", "loader2", later_stacks="", later_gap_s=0.0)
    assert made.report().verdict.confidence == "likely"


def test_a_rank_that_arrives_at_the_second_look_is_slow():
    later = recorded("all_reduce").stacks
    verdict = job("all_reduce", "sleep", later_stacks=later).report().verdict
    assert (verdict.cause, verdict.culprit_ranks) == ("straggler", (1,)), verdict


def test_a_lock_and_a_child_process_are_told_in_the_evidence():
    text = " ".join(job("all_reduce", "lock").report().verdict.evidence)
    assert "rank 1 waits for a lock or for another thread" in text
    text = " ".join(job("all_reduce", "sub").report().verdict.evidence)
    assert "rank 1 waits for a child process" in text
    assert "its child process (pid" in text
    assert "sleep 3600" in text


def _with_the_lock(name: str) -> str:
    """Return a stack as py-spy shows it of a thread that holds the interpreter's lock."""
    head, bracket, rest = recorded(name).stacks.rpartition(" (most recent call first)")
    return f"{head} {HOLDS_LOCK}{bracket}{rest}"


def test_a_wait_in_c_that_holds_the_interpreters_lock_is_a_gil_hang():
    stacks = _with_the_lock("sleep")
    verdict = job("all_reduce", "sleep", stacks=stacks, later_stacks=stacks).report().verdict
    assert (verdict.cause, verdict.culprit_ranks) == ("gil_hang", (1,)), verdict
    assert "situations.py:11 in hang" in verdict.summary


@pytest.mark.parametrize(
    "facts",
    [
        {"process_state": "R"},  # Python runs
        {"later_stacks": ""},
        {"later_stacks": recorded("sleep").stacks},  # it had the lock for a moment
    ],
)
def test_holding_the_lock_otherwise_is_nothing_special(facts):
    stacks = _with_the_lock("sleep")
    made = job("all_reduce", "sleep", **{"stacks": stacks, "later_stacks": stacks, **facts})
    assert made.report().verdict.cause == "host_hang"


def _all_inside(*names: str) -> Job:
    made = Job(len(names))
    for rank, name in zip(made.ranks, names, strict=True):
        its = recorded(name).facts()
        its["threads"] = (*its["threads"], *_BUSY_GLOO)
        rank.has_ring = False
        rank.host.update(its)
    return made


def test_of_ranks_that_all_wait_the_one_at_another_line_left_the_order():
    """Uneven batches: one rank has left the loop and is in the barrier behind it."""
    verdict = _all_inside("ddp", "ddp", "barrier").report().verdict
    assert (verdict.cause, verdict.culprit_ranks) == ("skipped_collective", (2,))
    assert verdict.confidence == "likely"
    assert "situations.py:72 in barrier" in verdict.summary
    assert verdict.fallout_ranks == (0, 1)


def test_of_two_that_wait_at_two_lines_neither_is_singled_out():
    verdict = _all_inside("ddp", "barrier").report().verdict
    assert (verdict.cause, verdict.culprit_ranks) == ("skipped_collective", (0, 1))
    assert verdict.confidence == "possible"


def test_ranks_that_all_wait_at_one_line_differ_in_nothing():
    verdict = _all_inside("barrier", "barrier", "barrier").report().verdict
    assert (verdict.cause, verdict.culprit_ranks) == ("unknown", ()), verdict


def test_a_recorded_wait_for_data_names_the_worker_and_its_line():
    """With a record of its own, the rank is known to wait; what for, its worker's stack says."""
    made = Job(2).train(3)
    made[0].all_reduce(inside=True)
    made[1].span("data_wait").host.update(recorded("loader2").facts())
    verdict = made.report().verdict
    pid = recorded("loader2").children[0].pid
    assert (verdict.cause, verdict.culprit_ranks) == ("data_starvation", (1,))
    assert f"for its data-loader worker (pid {pid}), which sleeps at situations.py:97 in fetch" in (
        verdict.summary
    )
    assert "situations.py:97" in verdict.next_action


def test_a_recorded_wait_for_data_without_workers_names_the_rank_s_own_line():
    made = Job(2).train(3)
    made[0].all_reduce(inside=True)
    facts = recorded("loader2").facts()
    made[1].span("data_wait").host.update({**facts, "children": (), "num_children": 0})
    assert "for its next batch" in made.report().verdict.summary


def test_a_frozen_rank_is_named_with_the_line_at_which_it_stopped():
    verdict = job("all_reduce", "sleep", process_state="T").report().verdict
    assert (verdict.cause, verdict.culprit_ranks) == ("frozen_process", (1,))
    assert ", at situations.py:" in verdict.summary
