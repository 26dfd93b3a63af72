"""A rank that was lost, and without which the job continued, explains nothing that follows."""

from __future__ import annotations

from pathlib import Path

import pytest

from echelon.analysis.diagnose import analyze, diagnose
from echelon.analysis.evidence.model import Incident
from echelon.analysis.finding import Finding
from echelon.analysis.sources.load import read_incident
from tests.analysis.imagined_job import Job

_LINE = "rank 1 was lost earlier, and the job continued without it"


def _after_a_loss() -> Job:
    """Rank 1 dies in the second step of three ranks; the others repeat it as `world.1`."""
    job = Job(3).train(2)
    job[1].exited(-9)
    for rank in job.others(1):
        rank.all_reduce(failed="PeerLostError: rank 1 is gone").wait(6)
        for _ in range(3):
            rank.step().all_reduce(group="world.1", ranks=(0, 2))
    return job


def _verdict(job: Job, since_ns: int = 0) -> Finding:
    incident = Incident(
        kind="failure",
        world_size=3,
        ended=(1, 2),
        lost_earlier={1: 1},
        epoch_since_ns=since_ns,
    )
    evidence = _evidence(job, incident)
    report = diagnose(evidence)
    (finding,) = report.findings
    assert evidence.missing == ()
    assert _LINE in finding.evidence
    return finding


def _evidence(job: Job, incident: Incident):
    from echelon.analysis.sources.builder import EvidenceBuilder

    builder = EvidenceBuilder()
    for record in job.records():
        builder.add(record)
    return builder.build(incident=incident)


def test_the_second_rank_that_is_killed_is_the_cause():
    job = _after_a_loss()
    job[2].exited(-9, order=1)
    job[0].all_reduce(group="world.1", ranks=(0, 2), inside=True)
    verdict = _verdict(job)
    assert (verdict.cause.value, verdict.culprit_ranks) == ("dead_process", (2,))
    assert verdict.confidence.value == "certain"
    assert "rank 0 waits for it in all_reduce #3" in verdict.summary
    assert not any("'world'" in line for line in verdict.evidence)


def test_an_exception_after_a_loss_is_the_cause():
    job = _after_a_loss()
    job[2].raised("builtins.ValueError", "a defect", order=1)
    job[0].all_reduce(group="world.1", ranks=(0, 2), inside=True)
    verdict = _verdict(job)
    assert (verdict.cause.value, verdict.culprit_ranks) == ("exception", (2,))
    assert verdict.confidence.value == "certain"


def test_operations_of_an_older_epoch_are_left_out_where_groups_have_the_same_name():
    """Ranks 0 and 2 were inside a group of their own when rank 1 died, and made it again."""
    job = Job(3).train(2)
    job[1].exited(-9)
    job[0].all_reduce(group="pair", ranks=(0, 2), failed="PeerLostError: rank 1 is gone")
    since_ns = max(rank.now_ns for rank in job.ranks)
    for rank in job.others(1):
        rank.wait(6)
        rank.counts.clear()
        rank.all_reduce(group="pair", ranks=(0, 2))
    job[2].exited(-9, order=1)
    job[0].all_reduce(group="pair", ranks=(0, 2), inside=True)
    verdict = _verdict(job, since_ns)
    assert (verdict.cause.value, verdict.culprit_ranks) == ("dead_process", (2,))
    assert "rank 0 waits for it in all_reduce #1" in verdict.summary


def test_operations_of_an_older_epoch_are_left_out_where_all_lost_ranks_are_replaced():
    """Rank 0 was inside an operation of the first world when rank 1 died; no rank is lost now."""
    job = Job(3).train(2)
    job[0].all_reduce(inside=True)
    since_ns = max(rank.now_ns for rank in job.ranks)
    for rank in job.ranks:
        rank.wait(6)
        rank.all_reduce(group="world.2", ranks=(0, 1, 2))
    job[2].exited(-9)
    for rank in job.others(2):
        rank.all_reduce(group="world.2", ranks=(0, 1, 2), inside=True)
    incident = Incident(kind="failure", world_size=3, ended=(2,), epoch_since_ns=since_ns)
    evidence = _evidence(job, incident)
    kept = {number for facts in evidence.ranks.values() for number in facts.rows["group"]}
    assert [evidence.groups[number].name for number in kept] == ["world.2"]
    verdict = diagnose(evidence).verdict
    assert verdict is not None
    assert (verdict.cause.value, verdict.culprit_ranks) == ("dead_process", (2,))
    assert "in all_reduce #1" in verdict.summary


def test_a_hang_after_a_loss_is_explained_by_the_rank_that_hangs():
    job = _after_a_loss()
    job[0].all_reduce(group="world.1", ranks=(0, 2), inside=True)
    job[2].stands()
    evidence = _evidence(job, Incident(kind="stall", world_size=3, lost_earlier={1: 1}))
    verdict = diagnose(evidence).verdict
    assert verdict is not None
    assert verdict.culprit_ranks == (2,)


def test_the_launchers_words_are_read(tmp_path: Path):
    job = _after_a_loss()
    job[2].exited(-9, order=1)
    folder = job.write(tmp_path / "incident_0", "failure", lost_earlier=[[1, 1]])
    assert read_incident(folder / "incident.json").lost_earlier == {1: 1}
    verdict = analyze(folder).verdict
    assert verdict is not None
    assert verdict.culprit_ranks == (2,)


@pytest.mark.parametrize("told", ["x", [1], [[1]], [["1", 1]], [[1, 0]], [[1, "1"]], [[-1, 1]]])
def test_damaged_words_are_left_out(tmp_path: Path, told: object):
    folder = _after_a_loss().write(tmp_path / "incident_0", "failure", lost_earlier=told)
    assert read_incident(folder / "incident.json").lost_earlier == {}


@pytest.mark.parametrize(
    ("told", "shown"),
    [
        ([], "See rank_1/attempt_0/stderr.log and"),
        ([[2, 0]], "See rank_1/attempt_0/stderr.log and"),
        ([[1, "0"]], "See rank_1/attempt_0/stderr.log and"),
        (
            [[1, 0]],
            "See rank_1/lost_0_of_attempt_0/stderr.log (in attempt_0 until the rank is replaced)",
        ),
        ([[1, 3]], "See rank_1/lost_3_of_attempt_0/stderr.log"),
    ],
)
def test_the_advice_names_the_log_of_the_rank_that_was_lost(tmp_path: Path, told, shown):
    """The folder `attempt_0` is that of the process that replaces the rank."""
    job = Job(3).train(2)
    job[1].exited(-9)
    verdict = analyze(job.write(tmp_path / "incident_0", "failure", set_aside=told)).verdict
    assert verdict is not None
    assert verdict.next_action.startswith(shown)


def test_a_rank_that_hangs_after_a_node_was_lost_is_the_cause():
    """The lost node's rank left no record, and no other rank waits for it."""
    job = _after_a_loss()
    job[0].all_reduce(group="world.1", ranks=(0, 2), inside=True)
    job[2].stands("train.py", 7, "augment")
    incident = Incident(
        kind="stall", world_size=3, ended=(1,), absent={1: "node b is lost"}, lost_earlier={1: 1}
    )
    verdict = diagnose(_evidence(job, incident)).verdict
    assert verdict is not None
    assert (verdict.cause.value, verdict.culprit_ranks) == ("host_hang", (2,))
