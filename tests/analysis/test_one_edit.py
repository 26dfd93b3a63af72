"""`certain` survives the loss of one observation: what may then be wrong is no longer certain."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from echelon.analysis.finding import Cause
from tests.analysis.imagined_job import Job
from tests.analysis.stories import STORIES

CERTAIN = [name for name, story in STORIES.items() if story.confidence == "certain"]
# A vote names those who differ of all that voted: with one of them unseen it names the others.
VOTES = {Cause.ROOT_MISMATCH.value, Cause.SHAPE_MISMATCH.value}


def lose_its_record(job: Job, rank: int) -> None:
    job.lose(rank)


def lose_its_ring(job: Job, rank: int) -> None:
    job[rank].has_ring = False
    job[rank].operations, job[rank].span_rows = [], []


def lose_its_stack(job: Job, rank: int) -> None:
    job[rank].host.pop("stacks", None)


def stop_it_with_the_others(job: Job, rank: int) -> None:
    if job[rank].host.get("alive"):
        job[rank].exited(-15, order=50, by_agent=True)


EDITS = [lose_its_record, lose_its_ring, lose_its_stack, stop_it_with_the_others]


@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: edit.__name__)
@pytest.mark.parametrize("name", CERTAIN)
def test_no_other_rank_is_named_with_certainty(name: str, edit: Callable[[Job, int], None]) -> None:
    story = STORIES[name]
    size = len(story.tell())
    others = [rank for rank in range(size) if rank not in story.culprits]
    for rank in {*story.culprits, *others[:1]}:
        job = story.tell()
        edit(job, rank)
        verdict = job.report(story.kind).verdict
        if verdict is None or verdict.confidence.value != "certain":
            continue
        named = list(verdict.culprit_ranks)
        is_part = bool(named) and set(named) <= set(story.culprits)
        assert named == story.culprits or is_part or story.cause in VOTES, (rank, verdict)
