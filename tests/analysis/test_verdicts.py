"""Each cause of docs/verdicts.md, told as the story of a job: the verdict names it and the rank."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from imagined_job import Job

Story = Callable[[], Job]
STORIES: dict[str, tuple[str, list[int], Story]] = {}
KINDS: dict[str, str] = {}
MISMATCH = "CollectiveMismatchError: ranks differ"


def story(cause: str, culprits: list[int], kind: str = "stall") -> Callable[[Story], Story]:
    def keep(tell: Story) -> Story:
        STORIES[tell.__name__] = (cause, culprits, tell)
        KINDS[tell.__name__] = kind
        return tell

    return keep


# ---- mismatches ----


@story("op_mismatch", [2], "failure")
def another_operation() -> Job:
    job = Job(4).train(3)
    for rank in job.others(2):
        rank.step().all_reduce(shape=(64,), site="train.py:20 backward", failed=MISMATCH)
    job[2].step().call("broadcast", root=0, shape=(64,), site="break.py:5 f", failed=MISMATCH)
    return job


@story("shape_mismatch", [0])
def another_shape_on_rank_0() -> Job:
    job = Job(4).train(3)
    for rank in job.others(0):
        rank.all_reduce(shape=(64,), inside=True)
    job[0].all_reduce(shape=(65,), inside=True)
    return job


@story("dtype_mismatch", [3])
def another_dtype() -> Job:
    job = Job(4).train(2)
    for rank in job.ranks:
        rank.all_reduce(dtype="float64" if rank.rank == 3 else "float32", inside=True)
    return job


@story("reduce_op_mismatch", [1])
def another_reduce_op() -> Job:
    job = Job(4).train(2)
    for rank in job.ranks:
        rank.all_reduce(reduce_op="max" if rank.rank == 1 else "sum", inside=True)
    return job


@story("root_mismatch", [1, 2])
def another_root_on_two_of_five() -> Job:
    job = Job(5).train(2)
    for rank in job.ranks:
        rank.call("broadcast", root=1 if rank.rank in (1, 2) else 0, inside=True)
    return job


@story("shape_mismatch", [0, 1])
def a_tie_names_both_sides() -> Job:
    job = Job(2).train(2)
    for rank in job.ranks:
        rank.all_reduce(shape=(8 + rank.rank,), inside=True)
    return job


@story("shape_mismatch", [2], "failure")
def seen_by_two_before_the_others_came() -> Job:
    """The mismatch is raised as soon as two ranks differ; who is odd shows in their past."""
    job = Job(4).train(3)
    said = (
        "CollectiveMismatchError: all_reduce #9: rank 2 passed float32[7], the others float32[64]"
    )
    job[0].all_reduce(shape=(64,), site="train.py:20 backward", failed=said)
    job[2].all_reduce(shape=(7,), site="train.py:20 backward", failed=said)
    return job


@story("shape_mismatch", [3])
def the_earliest_difference_is_the_root() -> Job:
    job = Job(4).train(1)
    for rank in job.ranks:
        rank.all_reduce(shape=(9 if rank.rank == 3 else 8,))
    for rank in job.ranks:
        rank.all_reduce(shape=(9 if rank.rank == 1 else 8,), inside=True)
    return job


@story("split_mismatch", [2])
def splits_that_do_not_fit() -> Job:
    job = Job(3).train(1)
    for rank in job.ranks:
        sends = (2, 2, 2) if rank.rank != 2 else (2, 3, 2)
        rank.call("all_to_all", splits=(sends, (2, 2, 2)), shape=None, inside=True)
    return job


# ---- slipped streams ----


def _skip(*, buckets: tuple[int, ...], skipped: int, ranks: int = 4, odd: int = 2) -> Job:
    """Let `odd` leave a bucket of the fourth step out, and all go on until they differ."""
    job = Job(ranks)
    streams: dict[int, list[tuple[int, tuple[int, ...]]]] = {r: [] for r in range(ranks)}
    for rank in range(ranks):
        for step in range(5):
            for bucket, size in enumerate(buckets):
                if not (rank == odd and step == 3 and bucket == skipped):
                    streams[rank].append((step, (size,)))
    for at in range(max(len(stream) for stream in streams.values())):
        calls = [stream[at] if at < len(stream) else None for stream in streams.values()]
        shapes = {call[1] for call in calls if call}
        stop = len(shapes) > 1 or None in calls
        for rank, call in zip(job.ranks, calls, strict=True):
            if call is not None:
                rank.step(call[0]).all_reduce(
                    shape=call[1], site="train.py:20 backward", inside=stop
                )
        if stop:
            break
    return job


@story("skipped_collective", [2])
def skips_a_bucket_of_another_size() -> Job:
    return _skip(buckets=(64, 128, 192), skipped=1)


@story("skipped_collective", [2])
def skips_the_last_bucket() -> Job:
    return _skip(buckets=(64, 128, 192), skipped=2)


@story("skipped_collective", [1])
def skips_one_of_equal_buckets() -> Job:
    """No signature ever differs: only the step shows it, and one call is short at the end."""
    return _skip(buckets=(64, 64, 64), skipped=1, odd=1)


@story("skipped_collective", [3])
def leaves_the_loop_for_a_barrier() -> Job:
    job = Job(4)
    for _ in range(6):
        for rank in job.ranks:
            rank.all_reduce(site="train.py:20 backward")
    for rank in job.others(3):
        rank.all_reduce(site="train.py:20 backward", inside=True)
    job[3].barrier(site="train.py:40 main", inside=True)
    return job


@story("skipped_collective", [0])
def makes_one_call_too_many() -> Job:
    job = Job(4).train(3)
    for rank in job.ranks:
        rank.step().all_reduce(shape=(64,), site="train.py:20 backward")
    job[0].all_reduce(shape=(64,), site="train.py:20 backward", inside=True)
    for rank in job.others(0):
        rank.all_reduce(shape=(128,), site="train.py:20 backward", inside=True)
    return job


@story("skipped_collective", [1])
def ends_well_while_the_others_go_on() -> Job:
    job = Job(3).train(3)
    for rank in job.others(1):
        rank.step().all_reduce(shape=(64,), inside=True)
    job[1].closed = True
    job[1].exited(0)
    return job


@story("skipped_collective", [1])
def of_two_ranks_the_one_with_the_short_step_skipped() -> Job:
    return _skip(buckets=(64, 128, 192), skipped=2, ranks=2, odd=1)


# ---- ended ranks ----


@story("exception", [2], "failure")
def raises() -> Job:
    job = Job(4).train(3)
    job[2].step().raised("builtins.ValueError", "bad batch")
    for rank in job.others(2):
        rank.step().all_reduce(inside=True)
    return job


@story("exception", [1], "failure")
def raises_first_and_others_lose_their_peer() -> Job:
    job = Job(4).train(3)
    job[1].step().raised("builtins.KeyError", "'x'", bases=("builtins.LookupError",), order=0)
    for order, rank in enumerate(job.others(1), 1):
        rank.step().all_reduce(failed="PeerLostError: rank 1 is gone")
        rank.raised(
            "echelon.errors.PeerLostError", "rank 1 is gone", order=order,
            bases=("echelon.errors.CollectiveError", "echelon.errors.EchelonError"),
        )  # fmt: skip
    return job


@story("exception", [3], "failure")
def the_earliest_exception_is_the_root() -> Job:
    job = Job(4).train(1)
    job[0].raised("builtins.ValueError", "later", order=1)
    job[3].raised("builtins.ValueError", "first", order=0)
    return job


@story("exception", [0], "failure")
def raises_without_a_recorder() -> Job:
    job = Job(2)
    job[0].has_ring = False
    tail = 'Traceback (most recent call last):\n  File "/u/t.py", line 9, in f\nValueError: no\n'
    job[0].exited(1, stderr_tail=tail)
    job[1].has_ring = False
    return job


@story("exception", [1], "failure")
def raises_under_torch_and_aborts_at_the_end() -> Job:
    """torch marks the lines of its traceback with the rank, and its threads abort the process."""
    job = Job(2)
    lines = [
        "Traceback (most recent call last):",
        '  File "/u/t.py", line 5, in <module>',
        "ValueError: x",
    ]
    tail = (
        "".join(f"[rank1]: {line}\n" for line in lines) + "terminate called without an exception\n"
    )
    job[1].has_ring = job[0].has_ring = False
    job[1].exited(-6, stderr_tail=tail)
    return job


@story("dead_process", [3], "failure")
def killed() -> Job:
    job = Job(4).train(3)
    job[3].exited(-9)
    for rank in job.others(3):
        rank.all_reduce(inside=True)
    return job


@story("dead_process", [1], "failure")
def sys_exit_without_a_traceback() -> Job:
    job = Job(3).train(2)
    job[1].exited(5)
    job[1].closed = True
    for rank in job.others(1):
        rank.all_reduce(failed="PeerLostError: rank 1 has left")
    return job


@story("dead_process", [1], "failure")
def what_the_agent_stopped_is_fallout() -> Job:
    job = Job(3).train(2)
    job[0].exited(-15, order=0, by_agent=True)
    job[1].exited(-11, order=1)
    job[2].exited(-15, order=2, by_agent=True)
    return job


@story("dead_process", [2])
def os_exit_0_in_the_middle() -> Job:
    job = Job(3).train(2)
    job[2].exited(0)
    for rank in job.others(2):
        rank.all_reduce(inside=True)
    return job


@story("dead_process", [2], "failure")
def no_record_at_all() -> Job:
    job = Job(4).train(3, but=(2,))
    for rank in job.others(2):
        rank.all_reduce(inside=True)
    return job.lose(2)


@story("out_of_memory", [0], "failure")
def killed_for_memory() -> Job:
    job = Job(4).train(3)
    job[0].exited(-9, oom_kill=True, rss_bytes=7 << 30)
    for rank in job.others(0):
        rank.all_reduce(inside=True)
    return job


@story("out_of_memory", [1], "failure")
def device_memory_is_used_up() -> Job:
    job = Job(2).train(3)
    job[1].raised("torch.OutOfMemoryError", "CUDA out of memory.", bases=("builtins.RuntimeError",))
    job[0].all_reduce(inside=True)
    return job


@story("dtype_mismatch", [2], "failure")
def a_mismatch_explains_the_exits() -> Job:
    job = Job(4).train(2)
    for order, rank in enumerate(job.ranks):
        dtype = "float16" if rank.rank == 2 else "float32"
        rank.all_reduce(dtype=dtype, failed="CollectiveMismatchError: dtypes differ")
        rank.raised("echelon.errors.CollectiveMismatchError", "dtypes differ", order=order)
    return job


# ---- stuck ranks ----


def _waiting_for(rank: int, size: int = 4) -> Job:
    job = Job(size).train(3)
    for other in job.others(rank):
        other.step().all_reduce(shape=(64,), site="train.py:20 backward", inside=True)
    job[rank].step()
    return job


@story("host_hang", [2])
def hangs_in_its_own_code() -> Job:
    job = _waiting_for(2)
    job[2].stands("tokenize.py", 88, "wait_for_tokenizer")
    return job


@story("host_hang", [1])
def hangs_inside_a_compute_span() -> Job:
    job = _waiting_for(1)
    job[1].span("compute").stands()
    return job


@story("data_starvation", [3])
def waits_for_data() -> Job:
    job = _waiting_for(3)
    job[3].span("data_wait").stands("data.py", 12, "read")
    return job


@story("data_starvation", [1, 3])
def two_wait_for_data() -> Job:
    job = Job(4).train(3)
    for rank in (job[0], job[2]):
        rank.all_reduce(inside=True)
    job[1].span("data_wait")
    job[3].span("data_wait")
    return job


@story("storage_stall", [0])
def the_innermost_span_decides() -> Job:
    job = _waiting_for(0)
    job[0].span("compute").span("checkpoint", depth=1)
    return job


@story("host_hang", [0])
def a_span_of_another_thread_does_not_count() -> Job:
    job = _waiting_for(0)
    job[0].span("compute").span("data_wait", thread=5).stands()
    return job


@story("storage_stall", [1])
def sleeps_uninterruptibly() -> Job:
    job = _waiting_for(1)
    job[1].host.update(process_state="D", wait_channel="nfs_wait")
    return job


@story("compile_stall", [2])
def compiles() -> Job:
    job = _waiting_for(2)
    job[2].span("compile")
    job[2].heartbeat_age_s = 20.0  # compilers hold the lock for long
    return job


@story("store_wait", [1])
def waits_for_a_key() -> Job:
    job = _waiting_for(1)
    job[1].span("store", detail="epoch/7")
    return job


@story("frozen_process", [3])
def is_stopped() -> Job:
    job = _waiting_for(3)
    job[3].host["process_state"] = "T"
    job[3].heartbeat_age_s = 30.0
    return job


@story("gil_hang", [2])
def holds_the_lock() -> Job:
    job = _waiting_for(2)
    job[2].host.update(process_state="R", cpu_share=1.0)
    job[2].heartbeat_age_s = 25.0
    return job


@story("host_hang", [3])
def a_subgroup_stall_is_reported_once() -> Job:
    job = Job(4).train(2)
    for rank in (job[0], job[1]):
        rank.all_reduce(group="tp0", ranks=(0, 1)).all_reduce(inside=True)
    job[2].all_reduce(group="tp1", ranks=(2, 3), inside=True)
    job[3].stands()
    return job


@story("host_hang", [2])
def a_pipeline_waits_for_a_hung_stage() -> Job:
    job = Job(4).train(1)
    job[0].send(1)
    job[1].recv(0).send(2, inside=True)
    job[3].recv(2, inside=True)
    job[2].stands()
    return job


@story("data_starvation", [0, 1, 2])
def everybody_waits_for_data() -> Job:
    job = Job(3).train(2)
    for rank in job.ranks:
        rank.span("data_wait")
    return job


@story("host_hang", [1])
def hangs_before_it_comes_to_the_meeting() -> Job:
    job = Job(3)
    for rank in job.others(1):
        rank.span("store", detail="gather ranks")
    job[1].stands("train.py", 12, "load_everything")
    return job


@story("dead_process", [2], "")
def rings_whose_owner_has_gone_silent() -> Job:
    """Read without their host: nobody said that rank 2 died, but its heart stopped."""
    job = _waiting_for(2)
    for rank in job.ranks:
        rank.host = {"alive": None}
    job[2].heartbeat_age_s = 25.0
    return job


@story("host_hang", [2], "failure")
def does_not_come_to_the_first_meeting_and_the_others_give_up() -> Job:
    job = Job(3)
    for order, rank in enumerate(job.others(2)):
        rank.raised(
            "echelon.errors.CollectiveTimeoutError", "init after 30.0 s: missing: 2", order=order,
            bases=("echelon.errors.EchelonError",),
        )  # fmt: skip
    job[2].stands("train.py", 12, "load_everything")
    return job


# ---- orders, pairs, transports ----


@story("order_desync", [0, 1, 2, 3])
def two_groups_in_different_orders() -> Job:
    job = Job(4).train(1)
    for rank in job.ranks:
        group = "a" if rank.rank < 2 else "b"
        rank.all_reduce(group=group, ranks=(0, 1, 2, 3), inside=True)
    return job


@story("order_desync", [1, 2])
def only_the_ranks_on_the_ring() -> Job:
    job = Job(4).train(1)
    for rank in (0, 3):
        job[rank].all_reduce(inside=True)
    job[1].recv(2, inside=True)
    job[2].recv(1, inside=True)
    return job


@story("p2p_unmatched", [1])
def receives_from_the_wrong_peer() -> Job:
    job = Job(4).train(1)
    job[0].send(1, inside=True)
    job[1].recv(2, inside=True)
    job[2].all_reduce(inside=True)
    job[3].all_reduce(inside=True)
    return job


@story("p2p_unmatched", [1])
def receives_from_the_wrong_peer_while_the_send_was_buffered() -> Job:
    """The right sender has gone on: only the pairs' past tells the two receivers apart."""
    job = Job(4).train(1)
    for _ in range(3):
        for rank in range(3):
            job[rank].send(rank + 1)
            job[rank + 1].recv(rank)
    job[0].send(1).all_reduce(inside=True)
    job[1].recv(2, inside=True)
    job[2].recv(1, inside=True)
    job[3].recv(2, inside=True)
    return job


@story("p2p_unmatched", [1])
def receives_from_the_wrong_peer_the_first_time() -> Job:
    job = Job(4).train(1)
    job[0].send(1)
    job[1].recv(2, inside=True)
    job[2].recv(1, inside=True)
    job[3].recv(2, inside=True)
    return job


@story("p2p_unmatched", [2])
def forgets_a_send_it_made_before() -> Job:
    job = Job(3)
    for _ in range(3):
        job[2].send(0)
        job[0].recv(2)
        for rank in job.ranks:
            rank.all_reduce()
    job[0].recv(2, inside=True)
    for rank in (job[1], job[2]):
        rank.all_reduce(inside=True)
    return job


@story("p2p_unmatched", [0])
def receives_what_nobody_ever_sent() -> Job:
    job = Job(3).train(3)
    job[0].recv(2, inside=True)
    for rank in (job[1], job[2]):
        rank.all_reduce(inside=True)
    return job


@story("dtype_mismatch", [0, 1])
def a_receive_of_another_type_than_the_send() -> Job:
    job = Job(2).train(1)
    job[0].send(1, dtype="float32", inside=True)
    job[1].recv(0, dtype="float64", inside=True)
    return job


@story("p2p_unmatched", [0, 1])
def tags_that_differ() -> Job:
    job = Job(2).train(1)
    job[0].send(1, tag=7, inside=True)
    job[1].recv(0, tag=8, inside=True)
    return job


@story("network", [])
def everybody_is_inside() -> Job:
    job = Job(4).train(3)
    for rank in job.ranks:
        rank.all_reduce(inside=True)
    return job


@story("device_stuck", [2])
def pending_here_and_done_by_its_peers() -> Job:
    job = Job(4).train(3)
    job[2].all_reduce(inside=True)
    for rank in job.others(2):
        rank.all_reduce().all_reduce(inside=True)
    return job


@story("straggler", [1], "")
def last_again_and_again() -> Job:
    job = Job(4)
    for _ in range(60):
        for rank in job.ranks:
            rank.wait(0.012 if rank.rank == 1 else 0.002)
        latest = max(rank.now_ns for rank in job.ranks)
        for rank in job.ranks:
            rank.all_reduce(took_s=(latest - rank.now_ns) / 1e9 + 0.001)
    return job


@story("straggler", [2], "")
def slow_before_the_first_of_several_buckets() -> Job:
    job = Job(4)
    for _ in range(60):
        for rank in job.ranks:
            rank.wait(0.02 if rank.rank == 2 else 0.004)
        for bucket in range(4):
            latest = max(rank.now_ns for rank in job.ranks)
            for rank in job.ranks:
                rank.all_reduce(shape=(bucket + 1,), took_s=(latest - rank.now_ns) / 1e9 + 0.001)
                rank.wait(((rank.rank + bucket) % 4) * 1e-6)
    return job


@story("unknown", [1])
def a_stall_that_was_over_before_the_snapshot() -> Job:
    job = Job(3).train(4)
    job[1].wait(4.0)
    latest = job[1].now_ns
    for rank in job.ranks:
        rank.all_reduce(took_s=(latest - rank.now_ns) / 1e9 + 0.001)
    job.train(2)
    job[0].call("barrier", shape=None, inside=True, group="alone", ranks=(0,))
    return job


@story("unknown", [])
def nobody_ever_recorded() -> Job:
    job = Job(2)
    job[0].has_ring = job[1].has_ring = False
    return job


@story("unknown", [], "failure")
def nothing_explains_the_failure() -> Job:
    return Job(2).train(2)


@pytest.mark.parametrize("name", STORIES)
def test_the_verdict_names_cause_and_ranks(name: str) -> None:
    cause, culprits, tell = STORIES[name]
    verdict = tell().report(KINDS[name]).verdict
    assert verdict is not None
    assert (verdict.cause.value, list(verdict.culprit_ranks)) == (cause, culprits), verdict


@pytest.mark.parametrize("name", STORIES)
def test_evidence_names_the_culprit(name: str) -> None:
    _, culprits, tell = STORIES[name]
    verdict = tell().report(KINDS[name]).verdict
    assert verdict is not None
    text = " ".join(verdict.evidence)
    assert verdict.next_action
    for culprit in culprits:
        assert f"rank {culprit}" in text
    assert verdict.operation is None or " " not in verdict.operation
    assert not set(verdict.fallout_ranks) & set(culprits)


def test_every_cause_has_a_story() -> None:
    from echelon.analysis.finding import Cause

    assert {cause for cause, _, _ in STORIES.values()} == {cause.value for cause in Cause}


def test_many_ranks_that_end_alike_after_the_root_are_one_finding() -> None:
    job = Job(6).train(1)
    job[4].raised("builtins.ValueError", "first", order=0)
    for order, rank in enumerate(job.others(4), 1):
        rank.raised("builtins.KeyError", f"{rank.rank}", order=order)
    findings = job.report("failure").findings
    assert [finding.culprit_ranks for finding in findings] == [(4,), (0, 1, 2, 3, 5)]


def test_who_was_asked_to_end_is_at_no_fault() -> None:
    job = Job(3).train(2)
    job[0].exited(-2)
    job[1].exited(143, order=1)
    job[2].raised("builtins.KeyboardInterrupt", "", bases=("builtins.BaseException",), order=2)
    assert job.report("signal").healthy
    assert not job.report("failure").healthy
