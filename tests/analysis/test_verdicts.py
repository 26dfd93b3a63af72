"""The verdict on every story names its cause and its ranks."""

from __future__ import annotations

import pytest

from echelon.analysis.finding import Cause
from tests.analysis.imagined_job import Job
from tests.analysis.stories import STORIES


@pytest.mark.parametrize("name", STORIES)
def test_the_verdict_names_cause_and_ranks(name: str) -> None:
    story = STORIES[name]
    report = story.tell().report(story.kind)
    verdict = report.verdict
    assert verdict is not None
    said = (verdict.cause.value, list(verdict.culprit_ranks))
    assert said == (story.cause, story.culprits), verdict
    assert verdict.confidence.value == story.confidence, verdict
    others = tuple((f.cause.value, f.culprit_ranks) for f in report.findings if f is not verdict)
    assert others == story.also


@pytest.mark.parametrize("name", STORIES)
def test_evidence_names_the_culprit(name: str) -> None:
    story = STORIES[name]
    verdict = story.tell().report(story.kind).verdict
    assert verdict is not None
    text = " ".join(verdict.evidence)
    assert verdict.next_action
    for culprit in story.culprits:
        assert f"rank {culprit}" in text
    assert verdict.operation is None or " " not in verdict.operation
    assert not set(verdict.fallout_ranks) & set(story.culprits)


def test_every_cause_has_a_story() -> None:
    assert {story.cause for story in STORIES.values()} == {cause.value for cause in Cause}


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


_GLOOS = """terminate called after throwing an instance of 'gloo::IoException'
  what():  [gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:9281"""


@pytest.mark.parametrize(
    ("said", "is_gloos"),
    [
        ("terminate called without an active exception", True),
        (_GLOOS, True),
        ("terminate called after throwing an instance of 'std::bad_alloc'", False),
        ("Aborted", False),
    ],
)
def test_an_abort_by_gloos_threads_at_exit_has_its_answer(said: str, is_gloos: bool) -> None:
    job = Job(2)
    job[0].has_ring = job[1].has_ring = False
    job[0].exited(0)
    job[1].exited(-6, order=1, stderr_tail=f"step 100 done\n{said}\n")
    verdict = job.report("failure").verdict
    assert verdict is not None
    assert (verdict.cause, verdict.culprit_ranks) == (Cause.DEAD_PROCESS, (1,))
    assert ("destroy_process_group()" in verdict.next_action) == is_gloos
    assert ("terminate called" in verdict.summary) == ("terminate called" in said)


def test_a_tie_of_two_calls_tells_to_compare_both():
    report = STORIES["of_two_calls_after_equally_many_batches_neither_is_to_blame"].tell().report()
    assert report.verdict is not None
    assert report.verdict.next_action.startswith("Compare the stacks of ranks 0 and 1")
