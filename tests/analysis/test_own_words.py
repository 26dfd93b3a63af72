"""What a rank wrote of its own end, and how its stacks were read, is part of the evidence."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from echelon.analysis.evidence.model import RankEvidence
from echelon.analysis.rules.one_rank.signals import (
    fault_lines,
    interrupted_lines,
    native_heartbeat_age_s,
    native_line,
)
from echelon.host.facts import OUTSIDE, SIGNAL
from echelon.recorder.format.schema import (
    Fault,
    HostFacts,
    HostThread,
    Identity,
    LastWords,
    Live,
)
from tests.analysis.imagined_job import Job

FAULT = Fault(
    signal=11, code=1, address=64, thread=7,
    frames=(
        "/x/echelon/recorder/_native.so+0x1", "__restore_rt (/l/libc.so.6+0x3c050)",
        "f (/a.so+0x10)", "g (/a.so+0x20)",
    ),
)  # fmt: skip


def rank(**facts: object) -> RankEvidence:
    host = HostFacts(**facts)  # type: ignore[arg-type]
    return RankEvidence(rank=3, rows=np.zeros(0), identity=Identity(rank=3), host=host)


def test_the_fault_is_told_without_the_handlers_own_frames():
    facts = replace(rank(exit_code=-11), fault=FAULT)
    (line,) = fault_lines(facts)
    assert line == "rank 3: SIGSEGV at address 0x40 in thread 7: f (/a.so+0x10) < g (/a.so+0x20)"


def test_a_fault_that_did_not_end_the_rank_is_not_told():
    assert fault_lines(replace(rank(exit_code=-9), fault=FAULT)) == []
    assert fault_lines(rank(exit_code=-11)) == []


def test_a_signal_is_owned_up_to():
    assert interrupted_lines(rank(stacks_from=OUTSIDE)) == ()
    assert "was sent a signal" in interrupted_lines(rank(stacks_from=SIGNAL))[0]


def test_the_main_threads_c_functions_are_one_line():
    stacks = "Thread 5 python:\n  sleep (libc.so.6)\n  ? hold (ext.so)\nThread 6 x:\n  poll"
    assert native_line(rank(native_stacks=stacks)) == (
        "rank 3, in C: sleep (libc.so.6) < ? hold (ext.so)",
    )
    assert native_line(rank()) == ()


def test_the_age_of_the_heartbeat_that_needs_no_lock():
    live = [0] * Live.NUM_WORDS
    live[Live.NATIVE_HEARTBEAT_MONO_NS] = 5_000_000_000
    seen = replace(rank(snapshot_mono_ns=9_000_000_000), live=tuple(live))
    assert native_heartbeat_age_s(seen) == 4.0
    assert native_heartbeat_age_s(rank(snapshot_mono_ns=9)) is None


def ended_in_a_thread(job: Job, rank: int) -> Job:
    """Let a thread of a rank end by an exception, as the rank itself records it."""
    job[rank].words = LastWords(
        type="builtins.ValueError", message="bad shard\nand more", site="/job/data.py:7 fetch",
        traceback="", mono_ns=1, thread="prefetch",
    )  # fmt: skip
    return job


def test_a_group_without_room_in_shared_memory_is_no_broken_link():
    job = Job(2).train(1)
    full = (
        "cannot allocate 3.2 MB of shared memory in /dev/shm for a group: No space left on device"
    )
    lost = "rank 0 did not hand over the shared memory: [Errno 104] Connection reset by peer"
    for rank, kind, message in ((0, "CollectiveError", full), (1, "PeerLostError", lost)):
        job[rank].words = LastWords(
            type=f"echelon.errors.{kind}", message=message, site="/job/train.py:7 main",
            traceback="", mono_ns=1 + rank,
        )  # fmt: skip
        job[rank].exited(1)
    verdict = job.report("failure").verdict
    assert (verdict.cause, verdict.culprit_ranks) == ("exception", (0,))
    assert "--shm-size" in verdict.next_action


def test_a_hang_whose_culprit_lost_a_thread_says_so():
    job = ended_in_a_thread(Job(3).train(2), 1)
    for rank in job.others(1):
        rank.all_reduce(inside=True)
    job[1].stands("train.py", 7, "next_batch")
    (finding,) = job.report().findings
    assert (finding.cause.value, finding.culprit_ranks) == ("host_hang", (1,))
    assert finding.evidence[-1] == (
        "a thread of rank 1 (prefetch) had ended with builtins.ValueError: bad shard "
        "at data.py:7 in fetch"
    )


def test_a_thread_that_ended_is_not_the_end_of_its_rank():
    job = ended_in_a_thread(Job(3).train(2), 1)
    job[2].exited(-9)
    assert job.report("failure").findings[0].culprit_ranks == (2,)


def test_a_kill_leaves_no_word_and_says_whether_it_was_for_memory():
    job = Job(2).train(1)
    job[1].exited(-9, stderr_tail="Map: 100%\n", oom_kill=False)
    job[0].all_reduce(inside=True)
    verdict = job.report("failure").verdict
    evidence = " ".join(verdict.evidence)
    assert "its cgroup counted no out-of-memory kill" in evidence
    assert "Map" not in evidence


def test_a_hang_that_nothing_recorded_says_which_ranks_wait():
    job = Job(3)
    for one in job.ranks:
        one.has_ring = False
        one.host.update(
            threads=(
                HostThread(name="python", call="futex"),
                HostThread(name="pt_gloo_runloop", call="futex", timed=True),
            )
        )
    job[1].host.update(threads=(HostThread(name="python", call="clock_nanosleep"),))
    assert job.report().verdict.summary.endswith("; ranks 0 and 2 wait for peers")


def test_the_end_of_a_traceback_is_given_without_the_lines_that_only_point():
    job = Job(2).train(1)
    job[0].all_reduce(inside=True)
    job[1].raised("builtins.ValueError", "bad")
    words = job[1].words
    assert words is not None
    pointing = (
        '  File "/job/train.py", line 42, in forward\n    x = y[0]\n        ~^^^\nValueError: bad\n'
    )
    job[1].words = replace(words, traceback=f"Traceback (most recent call last):\n{pointing}")
    (line,) = (one for one in job.report("failure").verdict.evidence if "traceback" in one)
    expected = 'File "/job/train.py", line 42, in forward | x = y[0] | ValueError: bad'
    assert line == f"its traceback ends: {expected}"
