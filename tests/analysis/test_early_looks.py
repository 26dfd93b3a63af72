"""How sure a verdict is that was asked for before the stall rule's limit."""

from __future__ import annotations

from dataclasses import replace

import pytest

from echelon.analysis.diagnose import _cautious
from echelon.analysis.evidence.model import Incident
from echelon.analysis.finding import Cause, Confidence, Finding
from tests.analysis.imagined_job import Job


@pytest.mark.parametrize(
    ("culprits", "is_early", "confidence"),
    [
        ((2,), True, Confidence.CERTAIN),
        ((0, 1, 2, 3), True, Confidence.LIKELY),
        ((), True, Confidence.LIKELY),
        ((0, 1, 2, 3), False, Confidence.CERTAIN),
    ],
    ids=["one of four", "all ranks", "none", "all ranks after the full limit"],
)
def test_an_early_look_is_certain_only_of_ranks_that_differ(culprits, is_early, confidence):
    evidence = Job(4).evidence()
    evidence = replace(evidence, incident=Incident(kind="stall", is_early=is_early))
    finding = Finding(
        cause=Cause.HOST_HANG, culprit_ranks=culprits, confidence=Confidence.CERTAIN, summary=""
    )
    assert _cautious(evidence, finding).confidence is confidence
