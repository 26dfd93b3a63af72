"""A rank inside a span is named with the user's line, wherever the span was opened."""

from __future__ import annotations

import pytest

from tests.analysis.imagined_job import Job

_LIBRARY = "site-packages/torch/_dynamo/callback.py:110 run_start_callbacks"


@pytest.mark.parametrize(
    ("site", "line"),
    [
        (_LIBRARY, "backends.py:12 in build"),
        ("train.py:88 next_batch", "train.py:88 in next_batch"),
    ],
)
def test_the_line_of_a_library_is_not_named_where_a_stack_shows_the_users(site, line):
    job = Job(3).train(3)
    for other in job.others(1):
        other.step().all_reduce(inside=True)
    job[1].step().span("compile", site=site).stands("backends.py", 12, "build")
    verdict = job.report().verdict
    assert (verdict.cause, verdict.culprit_ranks) == ("compile_stall", (1,)), verdict
    assert f"({line})" in verdict.summary


def test_the_line_of_a_library_is_better_than_none():
    job = Job(3).train(3)
    for other in job.others(1):
        other.step().all_reduce(inside=True)
    job[1].step().span("compile", site=_LIBRARY)
    assert "(callback.py:110 in run_start_callbacks)" in job.report().verdict.summary
