"""How long a node waits for its user, the coordinator and its workers."""

from __future__ import annotations

import signal

from echelon.launcher.node.patience import ANSWER_S, UNKILLABLE_S, Asked, Due, Grace, UserRequest


def test_a_scheduler_that_repeats_itself_hurries_nobody():
    user = UserRequest()
    assert user.on(signal.SIGTERM, 0.0) is Asked.STOP
    assert user.on(signal.SIGTERM, 0.1) is Asked.NOTHING
    assert user.on(signal.SIGTERM, 30.0) is Asked.NOTHING
    assert user.on(signal.SIGHUP, 31.0) is Asked.NOTHING


def test_a_person_who_presses_ctrl_c_again_after_a_second_is_obeyed_once():
    user = UserRequest()
    assert user.on(signal.SIGINT, 0.0) is Asked.STOP
    assert user.on(signal.SIGINT, 0.2) is Asked.NOTHING
    assert user.on(signal.SIGINT, 1.1) is Asked.HURRY
    assert user.on(signal.SIGINT, 1.2) is Asked.NOTHING


def test_a_node_stops_alone_if_the_coordinator_does_not_react():
    user = UserRequest()
    assert user.deadline_s() == float("inf")
    user.on(signal.SIGTERM, 10.0)
    assert user.deadline_s() == 10.0 + ANSWER_S
    user.answer()
    assert user.deadline_s() == float("inf")


def test_ranks_that_hang_are_killed_after_a_second_and_the_others_keep_their_grace():
    grace = Grace()
    grace.begin(3.0, 10.0, has_hung=True)
    assert grace.due(10.9) is Due.NOTHING
    assert grace.deadline_s() == 11.0
    assert grace.due(11.0) is Due.KILL_HUNG
    assert grace.due(11.1) is Due.NOTHING
    assert grace.deadline_s() == 13.0
    assert grace.due(13.0) is Due.KILL


def test_a_short_grace_holds_for_ranks_that_hang_too():
    grace = Grace()
    grace.begin(0.0, 10.0, has_hung=True)
    assert grace.due(10.0) is Due.KILL


def test_the_grace_runs_from_the_first_signal_and_each_step_is_due_once():
    grace = Grace()
    assert grace.due(1e9) is Due.NOTHING
    grace.begin(3.0, 10.0)
    grace.begin(0.0, 11.0)
    assert grace.due(12.9) is Due.NOTHING
    assert grace.deadline_s() == 13.0
    assert grace.due(13.0) is Due.KILL
    grace.note_killed(13.0)
    assert grace.due(13.1) is Due.NOTHING
    assert grace.due(18.0) is Due.NAME
    assert grace.due(18.1) is Due.NOTHING
    assert grace.due(13.0 + UNKILLABLE_S) is Due.GIVE_UP
    assert grace.due(1e9) is Due.NOTHING
    assert grace.deadline_s() == float("inf")
