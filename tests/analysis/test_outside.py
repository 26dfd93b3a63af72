"""Ranks that record nothing: what the kernel shows of their threads decides, or nothing does."""

from __future__ import annotations

from dataclasses import replace

import pytest

from echelon.analysis.diagnose import diagnose
from echelon.analysis.evidence.model import Incident
from echelon.analysis.sources.builder import EvidenceBuilder
from echelon.recorder.format.schema import HostThread, Socket
from tests.analysis.activity.recorded import recorded
from tests.analysis.imagined_job import STACK, Job

_GLOO = "pt_gloo_runloop"
_INSIDE = (
    HostThread(name="python", call="futex"),
    HostThread(name=_GLOO, call="futex", timed=True),
    HostThread(name=_GLOO, call="futex"),
)
_OUTSIDE = (HostThread(name=_GLOO, call="futex"),) * 2
_AT_STORE = (HostThread(name="python", call="poll"),)
_CONNECTED = (Socket(state="ESTABLISHED"),)


def _main(call: str) -> HostThread:
    return HostThread(name="python", call=call)


def job(*threads: tuple[HostThread, ...], **facts: object) -> Job:
    made = Job(len(threads))
    for rank, its in zip(made.ranks, threads, strict=True):
        rank.has_ring = False
        rank.host.update(threads=its, sockets=_CONNECTED, **facts)
    return made


@pytest.mark.parametrize(
    ("its", "words"),
    [
        ((_main("clock_nanosleep"), *_OUTSIDE), "sleeps (clock_nanosleep)"),
        ((_main("read"), *_OUTSIDE), "waits for data (read)"),
        ((_main("futex"), *_OUTSIDE), "waits for another thread (futex)"),
        ((_main("wait4"), *_OUTSIDE), "waits for a child process (wait4)"),
        ((_main("flock"), *_OUTSIDE), "waits for a file's lock (flock)"),
        ((_main("call 999"), *_OUTSIDE), "is in the kernel (call 999)"),
    ],
)
def test_the_rank_that_is_in_no_collective_is_named(its, words):
    verdict = job(_INSIDE, its, _INSIDE).report().verdict
    assert (verdict.cause, verdict.culprit_ranks, verdict.confidence) == (
        "host_hang", (1,), "likely",
    )  # fmt: skip
    assert f"rank 1 {words}, outside any collective" in verdict.summary
    assert verdict.fallout_ranks == (0, 2)
    assert any("stack" in line for line in verdict.would_settle)


def test_stacks_that_may_not_be_read_are_missing_with_what_permits_them():
    made = Job(2)
    for rank in made.ranks:
        rank.all_reduce()
    made[0].all_reduce(inside=True)
    made[1].host.update(stacks="", not_permitted=("ptrace", "fd"))
    verdict = made.report().verdict
    assert (verdict.cause, verdict.culprit_ranks) == ("host_hang", (1,))
    (missing,) = verdict.would_settle
    assert missing.startswith("rank 1's main thread's stack: no permission to trace it"), missing
    assert "SYS_PTRACE" in missing
    assert "ptrace_scope" in missing
    assert "rank 1's fd: not permitted to read" in verdict.evidence

    made = job(_INSIDE, (_main("read"), *_OUTSIDE), not_permitted=("ptrace",))
    (missing,) = made.report().verdict.would_settle
    assert "SYS_PTRACE" in missing
    assert "py-spy" not in missing


def test_a_busy_rank_is_named_too():
    made = job(_INSIDE, (HostThread(name="python"), *_OUTSIDE))
    made[1].host.update(process_state="R", cpu_share=0.99)
    verdict = made.report().verdict
    assert verdict.culprit_ranks == (1,)
    assert "rank 1 runs, outside any collective" in verdict.summary


def test_before_there_is_a_group_the_rank_that_does_not_come_is_named():
    verdict = job(_AT_STORE, (_main("clock_nanosleep"),), _AT_STORE).report().verdict
    assert (verdict.cause, verdict.culprit_ranks) == ("host_hang", (1,))


def test_a_stopped_rank_is_frozen_wherever_it_was_stopped():
    made = job(_INSIDE, _INSIDE, _INSIDE)
    made[2].host["process_state"] = "T"
    verdict = made.report().verdict
    assert (verdict.cause, verdict.culprit_ranks) == ("frozen_process", (2,))


def test_a_rank_in_a_collective_by_its_stack_waits(tmp_path):
    """py-spy's stacks say more than threads."""
    made = job(_OUTSIDE, _OUTSIDE)
    made[0].host["stacks"] = recorded("all_reduce").stacks
    made[1].host["stacks"] = STACK.format(file="load.py", line=7, function="next_batch")
    verdict = made.report().verdict
    assert (verdict.cause, verdict.culprit_ranks, verdict.confidence) == (
        "host_hang", (1,), "certain",
    )  # fmt: skip
    assert "load.py:7 in next_batch" in verdict.summary


@pytest.mark.parametrize(
    "its", [_INSIDE, (_main("futex"), *_OUTSIDE), ()], ids=["all inside", "all outside", "denied"]
)
def test_where_all_are_alike_nobody_is_named_and_what_is_missing_is_said(its):
    verdict = job(its, its, its).report().verdict
    assert (verdict.cause, verdict.culprit_ranks) == ("unknown", ())
    text = " ".join(verdict.would_settle)
    assert "stack" in text
    assert "torch's flight recorder" in text


def test_a_rank_without_a_dump_that_is_seen_waiting_is_not_accused():
    """Of three ranks one has written torch's dump; of the others the kernel tells them apart."""
    made = job(_INSIDE, _INSIDE, (_main("clock_nanosleep"), *_OUTSIDE))
    made[0].all_reduce().all_reduce(inside=True)
    verdict = made.report().verdict
    assert (verdict.cause, verdict.culprit_ranks) == ("host_hang", (2,)), verdict
    assert (verdict.operation, verdict.sequence) == ("all_reduce", 1)


def test_a_sleeper_among_main_threads_that_wait_is_a_possible_culprit():
    """A pipeline over Gloo: the main thread itself waits for a message, no Gloo thread does."""
    waits = (_main("futex"), *_OUTSIDE)
    verdict = job(waits, waits, (_main("clock_nanosleep"), *_OUTSIDE), waits).report().verdict
    assert (verdict.cause, verdict.culprit_ranks, verdict.confidence) == (
        "host_hang", (2,), "possible",
    )  # fmt: skip
    assert "alike" not in " ".join(verdict.would_settle)


def test_a_backward_pass_waits_in_a_thread_and_shows_no_call_of_a_collective():
    """The stack of one that waits in C++ ends at `loss.backward()`; its thread tells."""
    made = job(_INSIDE, _OUTSIDE, _INSIDE)
    for rank in (made[0], made[2]):
        rank.stands("train.py", 21, "backward")
    made[1].stands("train.py", 14, "load")
    verdict = made.report().verdict
    assert (verdict.culprit_ranks, verdict.confidence.value) == ((1,), "certain")
    assert "train.py:14 in load" in verdict.summary


def test_a_record_without_what_was_called_on_a_device_does_not_stand_for_the_calls():
    """The hooks of an unmodified program record host tensors: the rest is seen from outside."""
    made = job(_INSIDE, _OUTSIDE)
    builder = EvidenceBuilder()
    for record in made.records():
        settings = {"hooked": "torch", "device_operations": True}
        builder.add(
            replace(record, has_ring=True, identity=record.identity.changed(settings=settings))
        )
    evidence = builder.build(incident=Incident(kind="stall", world_size=2))
    assert not any(facts.has_ring or len(facts.rows) for facts in evidence.ranks.values())
    verdict = diagnose(evidence).verdict
    assert (verdict.cause, verdict.culprit_ranks) == ("host_hang", (1,)), verdict
