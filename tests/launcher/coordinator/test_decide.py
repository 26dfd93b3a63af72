"""The launcher's decisions, without a process, a socket or a clock."""

from __future__ import annotations

import signal

import pytest

from echelon.launcher.coordinator.decide import (
    BACKSTOP_S,
    GIVE_UP_S,
    SETTLE_S,
    Attempt,
    CollectIncident,
    DismissJoiners,
    EndAttempt,
    EndedBy,
    JoinerAdmitted,
    JoinerEnded,
    JoinerStarted,
    KillWorkers,
    LeaveRequested,
    Phase,
    StallExamined,
    StallSeen,
    StopRequested,
    StopWorkers,
    TimePassed,
    WorkerEnded,
    WorkerLost,
    describe_code,
)

_STOP = [StopWorkers(signal.SIGTERM)]


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


def test_ranks_that_a_node_does_not_kill_after_the_grace_are_killed_later():
    attempt = _attempt()
    attempt.on(WorkerEnded(0, 1), 0.0)
    attempt.on(TimePassed(), SETTLE_S)
    assert attempt.phase is Phase.STOPPING
    backstop_s = SETTLE_S + 10.0 + BACKSTOP_S
    assert attempt.on(TimePassed(), backstop_s - 0.1) == []
    assert attempt.on(TimePassed(), backstop_s) == [KillWorkers()]
    assert attempt.on(TimePassed(), backstop_s + GIVE_UP_S - 0.1) == []
    assert attempt.on(TimePassed(), backstop_s + GIVE_UP_S) == [
        EndAttempt(EndedBy.WORKER, failed=True, unkillable=(1,))
    ]


def test_a_stall_is_reported_and_the_job_goes_on():
    attempt = _attempt()
    assert attempt.on(StallSeen("slow"), 5.0) == [CollectIncident("stall", "slow")]
    assert attempt.phase is Phase.RUNNING


def test_the_ranks_that_hang_are_named_in_the_stop():
    attempt = _attempt(2, stop_on_stall=True)
    attempt.on(StallSeen("slow"), 5.0)
    stop = [StopWorkers(signal.SIGTERM, hung=(1,))]
    assert attempt.on(StallExamined(lasts=True, hung=(1,)), 8.0) == stop


def test_a_stall_that_lasts_ends_the_job_if_asked_to():
    attempt = _attempt(1, stop_on_stall=True)
    assert attempt.on(StallSeen("slow"), 5.0) == [CollectIncident("stall", "slow")]
    assert attempt.on(StallExamined(lasts=True), 8.0) == _STOP
    assert attempt.on(WorkerEnded(0, -15), 8.1) == [EndAttempt(EndedBy.STALL, failed=True)]


def test_progress_during_the_examination_of_a_stall_saves_the_job():
    attempt = _attempt(1, stop_on_stall=True)
    attempt.on(StallSeen("slow"), 5.0)
    assert attempt.on(StallExamined(lasts=False), 8.0) == []
    assert attempt.phase is Phase.RUNNING
    assert attempt.on(WorkerEnded(0, 0), 9.0) == [EndAttempt(EndedBy.WORKER, failed=False)]


def test_a_failure_while_stopping_for_a_stall_is_no_second_incident():
    attempt = _attempt(2, stop_on_stall=True)
    attempt.on(StallSeen("slow"), 5.0)
    attempt.on(StallExamined(lasts=True), 5.0)
    assert attempt.on(WorkerEnded(0, 1), 5.1) == []
    assert attempt.on(WorkerEnded(1, 1), 5.1) == [EndAttempt(EndedBy.STALL, failed=True)]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_same_request_from_other_nodes_takes_no_time_from_anybody(number):
    attempt = _attempt(1)
    assert attempt.on(StopRequested(number), 1.0) == [StopWorkers(number, urgent=True)]
    deadline_s = attempt.deadline_s
    assert attempt.stop_signal == number
    assert attempt.on(StopRequested(number), 1.1) == [StopWorkers(number, urgent=True)]
    assert (attempt.phase, attempt.deadline_s) == (Phase.STOPPING, deadline_s)
    assert attempt.on(WorkerEnded(0, 0), 4.0) == [EndAttempt(EndedBy.SIGNAL, failed=True)]


def test_a_node_that_leaves_ends_the_attempt_and_a_stop_of_the_job_overrules_it():
    attempt = _attempt(1)
    assert attempt.on(LeaveRequested(15), 1.0) == [StopWorkers(15, urgent=True)]
    assert attempt.on(WorkerEnded(0, 0), 1.5) == [EndAttempt(EndedBy.LEAVE, failed=True)]
    attempt = _attempt(1)
    attempt.on(LeaveRequested(15), 1.0)
    attempt.on(StopRequested(15), 1.1)
    attempt.on(LeaveRequested(15), 1.2)
    assert attempt.on(WorkerEnded(0, 0), 1.5) == [EndAttempt(EndedBy.SIGNAL, failed=True)]


def test_nothing_happens_after_the_end():
    attempt = _attempt(1)
    attempt.on(WorkerEnded(0, 0), 1.0)
    assert attempt.on(StallSeen("late"), 2.0) == []
    assert attempt.on(TimePassed(), 1e9) == []


def test_codes_are_said_in_words():
    assert describe_code(3) == "exited with code 3"
    assert describe_code(-11) == "was killed by SIGSEGV"
    assert describe_code(-63) == "was killed by signal 63"


def test_ranks_that_a_stop_signal_ended_wait_for_the_launchers_own():
    attempt = _attempt()
    assert attempt.on(WorkerEnded(0, -signal.SIGTERM), 1.0) == []
    assert attempt.on(WorkerEnded(1, -signal.SIGTERM), 1.0) == []
    assert attempt.on(StopRequested(signal.SIGTERM), 1.1) == [
        EndAttempt(EndedBy.SIGNAL, failed=True)
    ]


def test_ranks_that_a_stop_signal_ended_have_failed_if_the_launcher_gets_none():
    attempt = _attempt()
    attempt.on(WorkerEnded(0, -signal.SIGTERM), 1.0)
    assert attempt.on(WorkerEnded(1, 1), 1.0) == []
    assert attempt.on(TimePassed(), 1.0 + SETTLE_S) == [
        CollectIncident("failure", "rank 0 was killed by SIGTERM"),
        EndAttempt(EndedBy.WORKER, failed=True),
    ]


def test_a_loss_that_the_others_survive_is_collected_after_the_pause_and_is_no_failure():
    attempt = _attempt(4)
    assert attempt.on(WorkerLost(1, "was killed by SIGKILL"), 1.0) == []
    assert attempt.on(WorkerLost(2, "was killed by SIGSEGV"), 1.3) == []
    assert (attempt.phase, attempt.running) == (Phase.RUNNING, (0, 3))
    assert attempt.deadline_s == 1.0 + SETTLE_S
    reason = "rank 1 was killed by SIGKILL, rank 2 was killed by SIGSEGV"
    collect = CollectIncident("failure", reason, lost=(1, 2))
    assert attempt.on(TimePassed(), 1.0 + SETTLE_S) == [collect]
    assert attempt.deadline_s is None
    assert attempt.on(WorkerEnded(0, 0), 2.0) == []
    assert attempt.on(WorkerEnded(3, 0), 2.0) == [EndAttempt(EndedBy.WORKER, failed=False)]


def test_a_loss_just_before_the_end_is_collected_before_it():
    attempt = _attempt()
    attempt.on(WorkerLost(1, "was killed by SIGKILL"), 1.0)
    assert attempt.on(WorkerEnded(0, 0), 1.1) == [
        CollectIncident("failure", "rank 1 was killed by SIGKILL", lost=(1,)),
        EndAttempt(EndedBy.WORKER, failed=False),
    ]


def test_survivors_that_fail_after_a_loss_make_one_incident_of_both():
    attempt = _attempt(3)
    attempt.on(WorkerLost(1, "was killed by SIGKILL"), 1.0)
    assert attempt.on(WorkerEnded(0, 1), 1.1) == []
    assert attempt.on(TimePassed(), 1.1 + SETTLE_S) == [
        CollectIncident("failure", "rank 0 exited with code 1"),
        *_STOP,
    ]
    assert attempt.on(WorkerEnded(2, -15), 2.0) == [EndAttempt(EndedBy.WORKER, failed=True)]


def _replacing() -> Attempt:
    """An attempt of two ranks, in which a process was started in the place of rank 1."""
    attempt = _attempt()
    attempt.on(WorkerLost(1, "was killed", is_explained=True), 1.0)
    assert attempt.on(JoinerStarted(1), 2.0) == []
    assert attempt.running == (0, 1)
    return attempt


def test_a_process_that_has_not_joined_is_dismissed_when_all_workers_have_succeeded():
    attempt = _replacing()
    assert attempt.on(WorkerEnded(0, 0), 3.0) == [DismissJoiners((1,))]
    assert attempt.on(JoinerEnded(1), 4.0) == [EndAttempt(EndedBy.WORKER, failed=False)]


def test_the_end_of_a_process_that_has_not_joined_changes_nothing():
    attempt = _replacing()
    assert attempt.on(JoinerEnded(1), 3.0) == []
    assert (attempt.running, attempt.phase) == ((0,), Phase.RUNNING)


def test_an_admitted_process_is_a_worker():
    attempt = _replacing()
    assert attempt.on(JoinerAdmitted(1), 3.0) == []
    assert attempt.on(WorkerEnded(0, 0), 4.0) == []
    assert attempt.on(WorkerEnded(1, 0), 5.0) == [EndAttempt(EndedBy.WORKER, failed=False)]


def test_a_process_that_has_not_joined_is_stopped_with_the_workers():
    attempt = _replacing()
    assert attempt.on(StopRequested(signal.SIGTERM), 3.0) == [
        StopWorkers(signal.SIGTERM, urgent=True)
    ]
    assert attempt.on(WorkerEnded(0, -signal.SIGTERM), 4.0) == []
    assert attempt.on(JoinerEnded(1), 5.0) == [EndAttempt(EndedBy.SIGNAL, failed=True)]


def test_an_admission_that_is_taken_back_leaves_a_process_to_dismiss():
    attempt = _replacing()
    attempt.on(JoinerAdmitted(1), 3.0)
    attempt.on(JoinerStarted(1), 4.0)
    assert attempt.on(WorkerEnded(0, 0), 5.0) == [DismissJoiners((1,))]
