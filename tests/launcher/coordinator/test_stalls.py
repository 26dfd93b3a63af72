"""Which stalls end their ranks at once, and which get time to end by themselves. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from echelon.launcher.control import messages as m
from echelon.launcher.coordinator.decide import StallExamined, StopRequested
from echelon.launcher.coordinator.gathering.roster import Node
from echelon.launcher.coordinator.loss.hung import DIES_S, HungRanks
from echelon.launcher.coordinator.policy.failure import Failure
from echelon.launcher.coordinator.stalls import VERDICT_S, Stalls
from echelon.launcher.coordinator.world import World
from echelon.launcher.job.report import Incident
from echelon.launcher.options.options import parse

_RESTART = ("--on-stall", "restart", "--stall-timeout", "10", "--max-restarts", "3")


class _Losses:
    """Decides which losses are survived."""

    why_not = ""

    def why_not_without(self, world: World, ranks: Sequence[int]) -> str:
        return self.why_not


class _Job:
    """A stall that was examined, and what it was followed by."""

    def __init__(self, *argv: str) -> None:
        self.options = parse([*argv, "--no-python", "true"], {})
        self.waits = True
        self.ended: list[bool] = []
        self.hung_ranks: tuple[int, ...] = ()
        self.said = ""
        node = Node(name="a", host="a", num_workers=2)
        self.world = World.of(
            [node], number=0, grace_s=1.0, stop_on_stall=True, stall_timeout_s=10.0
        )
        self.incident = Incident(Path("incident_0"), "stall", 0, "slow")
        self.losses, self.sent = _Losses(), []
        send = lambda node, command: self.sent.append((node, command))  # noqa: E731
        self.hung = HungRanks(self.losses, send, self._say)
        self.moved = False  # ranks have reported progress that no look has seen yet
        self.num_begun = 0
        self.stalls = Stalls(
            self.options, lambda _: self.waits, self._end, self._say, self.hung,
            look=self._look, begin_again=self._begin_again,
        )  # fmt: skip

    def _end(self, world: World, event: StallExamined) -> None:
        self.ended.append(event.lasts)
        self.hung_ranks = event.hung

    def _say(self, text: str) -> None:
        self.said += text

    def _look(self, world: World) -> None:
        if self.moved:
            self.stalls.note_progress()

    def _begin_again(self, world: World) -> None:
        self.num_begun += 1

    def explain(
        self,
        cause: str,
        confidence: str = "certain",
        ranks: tuple[int, ...] = (1,),
        idle: tuple[int, ...] = (0, 1),
        group: str = "world",
        saving_s: float = 0.0,
    ):
        self.waits = False
        self.incident.verdict = {
            "cause": cause, "culprit_ranks": list(ranks), "confidence": confidence,
            "summary": "rank 1 sleeps at train.py:7 in step", "group": group,
            "operation": "all_gather",
        }  # fmt: skip
        self.incident.circumstances = {"idle_ranks": list(idle), "saving_s": saving_s}

    def begin(self, *, lasts: bool = True) -> None:
        self.stalls.on_examined(self.world, StallExamined(lasts=lasts), self.incident, 0.0)


@pytest.fixture
def job() -> _Job:
    return _Job(*_RESTART)


@pytest.mark.parametrize(
    "cause", ["straggler", "network", "storage_stall", "compile_stall", "unknown"]
)
def test_a_stall_that_may_pass_has_three_stall_timeouts_to_do_so(job, cause):
    job.begin()
    job.explain(cause)
    job.stalls.step(1.0)
    job.stalls.step(30.9)
    assert job.ended == []
    assert "may pass" in job.said
    job.stalls.step(job.stalls.deadline_s())
    assert job.ended == [True]
    job.stalls.step(1000.0)
    assert job.ended == [True], "it ended twice"


@pytest.mark.parametrize(("saving_s", "left_s"), [(9.0, 30.0), (15.0, 25.0), (39.0, 1.0)])
def test_the_time_that_a_checkpoint_took_before_its_stall_counts(job, saving_s, left_s):
    job.begin()
    job.explain("storage_stall", saving_s=saving_s)
    job.stalls.step(1.0)
    assert job.stalls.deadline_s() == 1.0 + left_s
    job.stalls.step(0.9 + left_s)
    assert job.ended == []
    job.stalls.step(1.0 + left_s)
    assert job.ended == [True]


def test_a_checkpoint_that_has_hung_for_four_stall_timeouts_gets_no_more_time(job):
    job.begin()
    job.explain("storage_stall", saving_s=41.0)
    job.stalls.step(1.0)
    assert job.ended == [True]
    assert "the checkpoint has taken 41 s already" in job.said


@pytest.mark.parametrize("cause", ["host_hang", "frozen_process", "shape_mismatch"])
def test_a_program_that_hangs_is_ended_as_soon_as_its_verdict_is_known(job, cause):
    job.begin()
    job.stalls.step(0.5)
    assert job.ended == []
    job.explain(cause)
    job.stalls.step(1.0)
    assert job.ended == [True]


@pytest.mark.parametrize(
    ("cause", "confidence", "hung"),
    [
        ("host_hang", "certain", (1,)),
        ("gil_hang", "certain", (1,)),
        ("storage_stall", "certain", (1,)),  # what it would save to does not answer
        ("host_hang", "likely", ()),
        ("frozen_process", "certain", ()),  # it continues when it is asked to stop, and may save
        ("shape_mismatch", "certain", ()),
    ],
)
def test_only_a_rank_that_certainly_cannot_save_gets_less_grace(job, cause, confidence, hung):
    job.begin()
    job.explain(cause, confidence)
    job.stalls.step(1.0)
    job.stalls.step(31.0)  # some causes may pass until then
    assert job.ended == [True]
    assert job.hung_ranks == hung


def test_ranks_that_progress_are_not_ended_later(job):
    job.begin()
    job.explain("straggler")
    job.stalls.step(1.0)
    job.stalls.note_progress()
    job.stalls.step(1000.0)
    assert job.ended == []
    assert job.stalls.deadline_s() == float("inf")


def test_a_stall_without_a_verdict_may_pass_until_a_late_one_says_otherwise(job):
    job.begin()
    assert job.stalls.deadline_s() == VERDICT_S
    job.stalls.step(VERDICT_S)
    job.stalls.step(VERDICT_S + 1)
    assert job.ended == []
    assert job.stalls.deadline_s() == VERDICT_S + 30.0
    job.explain("host_hang")
    job.stalls.step(VERDICT_S + 2)
    assert job.ended == [True]


def test_each_restart_in_vain_doubles_the_time_that_the_next_stall_has(job):
    job.explain("unknown")
    times = []
    for _ in range(8):
        job.begin()
        times.append(job.stalls.deadline_s())
        job.stalls.step(job.stalls.deadline_s())
    assert times == [30.0, 60.0, 120.0, 240.0, 480.0, 480.0, 480.0, 480.0]
    job.begin()
    job.stalls.note_progress()
    job.begin()
    assert job.stalls.deadline_s() == 30.0


def test_a_stall_beyond_those_that_are_kept_has_time_to_pass_too(job):
    job.stalls.on_examined(job.world, StallExamined(lasts=True), None, 0.0)
    job.stalls.step(29.9)
    assert job.ended == []
    job.stalls.step(30.0)
    assert job.ended == [True]


@pytest.mark.parametrize(
    "argv",
    [
        ("--on-stall", "stop"),
        ("--on-stall", "report"),
        (*_RESTART, "--restart-policy", "always"),
    ],
)
def test_without_the_smart_policy_nothing_waits(argv):
    job = _Job(*argv)
    job.begin()
    assert job.ended == [True]


def test_a_stall_that_cleared_while_it_was_examined_ends_nothing(job):
    job.begin(lasts=False)
    assert job.ended == [False]


_REPLACE = ("--on-stall", "replace", "--on-loss", "shrink", "--stall-timeout", "10")


def _hang(job: _Job, cause: str = "host_hang", **verdict) -> None:
    """A stall that is examined and explained."""
    job.waits = True
    job.begin()
    job.explain(cause, **verdict)
    job.stalls.step(1.0)


@pytest.mark.parametrize("cause", ["frozen_process", "host_hang", "gil_hang"])
def test_the_culprits_of_a_certain_hang_are_killed_and_nothing_else_ends(cause):
    job = _Job(*_REPLACE)
    _hang(job, cause, ranks=(0, 1))
    assert job.sent == [("a", m.KillRanks(attempt=0, ranks=[0, 1]))]
    job.stalls.step(1.0 + DIES_S - 0.1)
    job.hung.note_ended(0, is_survived=True)
    assert (job.hung.is_killing, job.incident.recovered) == (True, False)
    job.hung.note_ended(1, is_survived=True)
    assert (job.hung.is_killing, job.incident.recovered) == (False, True)
    assert job.stalls.deadline_s() == float("inf")
    job.stalls.step(1000.0)
    assert (job.ended, len(job.sent)) == ([], 1)


@pytest.mark.parametrize(
    ("cause", "confidence", "ranks", "says"),
    [
        ("frozen_process", "likely", (1,), "the verdict on frozen_process is not certain"),
        ("shape_mismatch", "certain", (1,), "the cause is shape_mismatch, not the hang"),
        ("device_stuck", "certain", (1,), "the cause is device_stuck, not the hang"),
        ("host_hang", "certain", (), "the verdict on host_hang names no rank"),
    ],
)
def test_a_stall_without_a_sure_culprit_ends_as_under_restart(cause, confidence, ranks, says):
    job = _Job(*_REPLACE)
    _hang(job, cause, confidence=confidence, ranks=ranks)
    assert says in job.said
    assert (job.sent, job.ended) == ([], [True])


def test_a_hang_whose_loss_would_not_be_survived_ends_as_under_restart():
    job = _Job(*_REPLACE)
    job.losses.why_not = "1 rank is left, below --min-ranks 2"
    _hang(job)
    assert "no rank is ended: 1 rank is left, below --min-ranks 2" in job.said
    assert (job.sent, job.ended) == ([], [True])


def test_a_stall_that_may_pass_has_the_same_time_as_under_restart():
    job = _Job(*_REPLACE)
    _hang(job, "straggler")
    assert (job.sent, job.ended) == ([], [])
    assert "straggler may pass" in job.said


def test_a_stall_that_clears_before_its_verdict_kills_no_rank():
    job = _Job(*_REPLACE)
    job.begin()
    job.stalls.note_progress()
    job.explain("frozen_process")
    job.stalls.step(1.0)
    assert (job.sent, job.ended) == ([], [])


def test_a_rank_that_survives_sigkill_ends_the_attempt_once():
    job = _Job(*_REPLACE)
    _hang(job, "frozen_process")
    assert job.stalls.deadline_s() == 1.0 + DIES_S
    job.stalls.step(1.0 + DIES_S)
    job.stalls.step(2.0 + DIES_S)
    assert job.ended == [True]
    assert "rank 1 survived SIGKILL for 30 s" in job.said


def test_a_program_that_keeps_hanging_at_the_same_place_is_not_replaced_indefinitely():
    """Each rank that repeats the step may hang there, too, in the group of another epoch."""
    job = _Job(*_REPLACE)
    for group in ("world", "world.1", "world.2"):
        _hang(job, group=group)
        job.hung.note_ended(1, is_survived=True)
    assert len(job.sent) == 2
    place = "train.py:7 in step world all_gather"
    assert f"ranks keep hanging at the same place ({place})" in job.said
    assert job.ended == [True]
    job.stalls.clear()  # the next attempt
    _hang(job)
    assert len(job.sent) == 3


@pytest.mark.parametrize("cause", ["host_hang", "gil_hang"])
@pytest.mark.parametrize("idle", [(), (0,)])
def test_a_rank_that_may_be_computing_has_time_to_finish_that(cause, idle):
    """A long evaluation on one rank is a hang to the others, and ends by itself."""
    job = _Job(*_REPLACE)
    _hang(job, cause, ranks=(0, 1), idle=idle)
    busy = "rank 1 is" if idle else "ranks 0 and 1 are"
    assert f"no rank is ended: {busy} computing, or may be, and may finish that" in job.said
    assert f"{cause} may pass: ranks have 30 s to make progress" in job.said
    assert (job.sent, job.ended) == ([], [])
    job.stalls.step(31.0)
    assert job.ended == [True]


def test_a_frozen_rank_is_ended_whatever_it_used_before():
    job = _Job(*_REPLACE)
    _hang(job, "frozen_process", idle=())
    assert job.sent == [("a", m.KillRanks(attempt=0, ranks=[1]))]


def test_progress_that_was_reported_before_the_verdict_is_seen_before_a_rank_is_killed():
    job = _Job(*_REPLACE)
    job.begin()
    job.moved = True
    job.explain("frozen_process")
    job.stalls.step(1.0)
    assert (job.sent, job.ended) == ([], [])


def test_a_stall_ends_with_the_loss_of_a_rank_that_the_others_survive():
    job = _Job(*_REPLACE)
    job.begin()
    job.stalls.note_loss()
    job.explain("frozen_process")
    job.stalls.step(1.0)
    assert (job.sent, job.ended, job.said) == ([], [], "")
    assert job.stalls.deadline_s() == float("inf")


def test_a_verdict_that_names_only_lost_ranks_ends_no_rank_and_its_stall_begins_again():
    job = _Job(*_REPLACE)
    job.world.note_ended(1, -9)
    job.world.published[1] = 1
    _hang(job, "frozen_process")
    assert (job.sent, job.ended, job.num_begun) == ([], [], 1)
    _hang(job, "frozen_process", ranks=(0, 1))
    assert job.sent == [("a", m.KillRanks(attempt=0, ranks=[0]))]
    assert "rank 0 hangs (frozen_process); ending it" in job.said


@pytest.mark.parametrize("when", ["before the verdict", "before the ranks die"])
def test_an_attempt_that_is_ending_for_another_reason_hears_no_more_of_its_stall(when):
    job = _Job(*_REPLACE)
    if when == "before the ranks die":
        _hang(job, "frozen_process", ranks=(0, 1))
        assert "ranks 0 and 1 hang (frozen_process); ending them" in job.said
    job.said = ""
    job.world.attempt.on(StopRequested(15), 0.0)
    if when == "before the verdict":
        _hang(job, "frozen_process")
    job.stalls.step(1.0 + DIES_S)
    assert (job.said, job.ended) == ("", [])


def test_a_hang_at_an_unknown_place_names_none():
    job = _Job(*_REPLACE)
    failure = Failure(
        attempt=0, cause="host_hang", is_certain=True, culprit_ranks=(1,), idle_ranks=(1,)
    )
    for _ in range(2):
        assert job.hung.end(job.world, failure, job.incident, 0.0) == ""
    why_not = job.hung.end(job.world, failure, job.incident, 0.0)
    assert why_not == "ranks keep hanging at the same place"


def test_under_replace_a_stall_without_an_incident_says_that_no_rank_is_ended():
    job = _Job(*_REPLACE)
    job.stalls.on_examined(job.world, StallExamined(lasts=True), None, 0.0)
    assert job.said == "no rank is ended: the stall's incident was not kept"
