"""The launcher's decisions, without a process, a socket or a clock."""

from __future__ import annotations

import signal

import pytest

from echelon.launcher.decide import (
    SETTLE_S,
    Attempt,
    CollectIncident,
    EndAttempt,
    EndedBy,
    Phase,
    SignalWorkers,
    StallSeen,
    StopRequested,
    TimePassed,
    WorkerEnded,
    describe_code,
)

_STOP = [SignalWorkers(signal.SIGTERM), SignalWorkers(signal.SIGCONT)]


def _attempt(world_size: int = 2, *, stop_on_stall: bool = False) -> Attempt:
    return Attempt(world_size, grace_s=10.0, stop_on_stall=stop_on_stall)


def test_all_ended_well_is_a_good_end():
    attempt = _attempt()
    assert attempt.on(WorkerEnded(0, 0), 1.0) == []
    assert attempt.on(WorkerEnded(1, 0), 2.0) == [EndAttempt(EndedBy.WORKER, failed=False)]


def test_the_first_failure_waits_for_its_victims_then_stops_the_rest():
    attempt = _attempt(3)
    assert attempt.on(WorkerEnded(1, -9), 1.0) == []
    assert attempt.deadline_s == 1.0 + SETTLE_S
    assert attempt.on(WorkerEnded(0, 1), 1.2) == []
    assert attempt.deadline_s == 1.0 + SETTLE_S, "a second failure must not prolong the pause"
    assert attempt.on(TimePassed(), 1.4) == []
    assert attempt.on(TimePassed(), 1.5) == [
        CollectIncident("failure", "rank 1 was killed by SIGKILL"),
        *_STOP,
    ]
    assert attempt.on(WorkerEnded(2, -15), 1.6) == [EndAttempt(EndedBy.WORKER, failed=True)]


def test_when_all_have_failed_nothing_waits():
    attempt = _attempt()
    attempt.on(WorkerEnded(1, 1), 1.0)
    assert attempt.on(WorkerEnded(0, 1), 1.1) == [
        CollectIncident("failure", "rank 1 exited with code 1"),
        EndAttempt(EndedBy.WORKER, failed=True),
    ]


def test_who_ignores_sigterm_is_killed_after_the_grace():
    attempt = _attempt()
    attempt.on(WorkerEnded(0, 1), 0.0)
    attempt.on(TimePassed(), SETTLE_S)
    assert attempt.phase is Phase.STOPPING
    assert attempt.on(TimePassed(), SETTLE_S + 9.9) == []
    assert attempt.on(TimePassed(), SETTLE_S + 10.0) == [SignalWorkers(signal.SIGKILL)]


def test_a_stall_is_reported_and_the_job_goes_on():
    attempt = _attempt()
    assert attempt.on(StallSeen("slow"), 5.0) == [CollectIncident("stall", "slow")]
    assert attempt.phase is Phase.RUNNING


def test_a_stall_ends_the_job_if_asked_to():
    attempt = _attempt(1, stop_on_stall=True)
    assert attempt.on(StallSeen("slow"), 5.0) == [CollectIncident("stall", "slow"), *_STOP]
    assert attempt.on(WorkerEnded(0, -15), 5.1) == [EndAttempt(EndedBy.STALL, failed=True)]


def test_a_failure_while_stopping_for_a_stall_is_no_second_incident():
    attempt = _attempt(2, stop_on_stall=True)
    attempt.on(StallSeen("slow"), 5.0)
    assert attempt.on(WorkerEnded(0, 1), 5.1) == []
    assert attempt.on(WorkerEnded(1, 1), 5.1) == [EndAttempt(EndedBy.STALL, failed=True)]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_passed_on_and_a_second_one_does_not_wait(number):
    attempt = _attempt(1)
    assert attempt.on(StopRequested(number), 1.0) == [
        SignalWorkers(number),
        SignalWorkers(signal.SIGCONT),
    ]
    assert attempt.stop_signal == number
    assert attempt.on(StopRequested(number), 1.1) == [SignalWorkers(signal.SIGKILL)]
    assert attempt.on(WorkerEnded(0, -9), 1.2) == [EndAttempt(EndedBy.SIGNAL, failed=True)]


def test_nothing_happens_after_the_end():
    attempt = _attempt(1)
    attempt.on(WorkerEnded(0, 0), 1.0)
    assert attempt.on(StallSeen("late"), 2.0) == []
    assert attempt.on(TimePassed(), 1e9) == []


def test_codes_are_said_in_words():
    assert describe_code(3) == "exited with code 3"
    assert describe_code(-11) == "was killed by SIGSEGV"
    assert describe_code(-63) == "was killed by signal 63"
