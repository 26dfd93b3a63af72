"""What a rank does where others join: reports, limits and errors, in one process."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import echelon.dist as dist
from echelon.dist.resilient.epochs import Superseded
from echelon.dist.resilient.joining import Joins
from echelon.dist.resilient.kept import KeptState
from echelon.dist.resilient.training.replicated import Training
from echelon.recorder.continuation import Epoch, read_standing


@pytest.fixture
def training(tmp_path, monkeypatch):
    """A rank of a world of its own, under a launcher that replaces lost ranks."""
    monkeypatch.setenv("ECHELON_RANK_DIR", str(tmp_path))
    dist.init(timeout_s=20)
    model = nn.Linear(2, 2)
    kept = KeptState(model, torch.optim.SGD(model.parameters(), lr=0.1), [])
    joins = Joins(is_on=True)
    try:
        yield Training(lambda _: lambda step: step, kept, 0, 1, None, joins, is_protected=True)
    finally:
        dist.shutdown()


def _refuse(*_):
    raise Superseded


def test_a_rank_reports_each_meeting_it_goes_to(training, tmp_path, monkeypatch):
    """The launcher then knows that a rank which joins keeps it waiting; also after a loss."""
    monkeypatch.setattr(training._epochs, "meet", _refuse)
    with pytest.raises(Superseded):
        training._join(Epoch(number=3, roster=(0, 1), lost=(2,)))
    assert read_standing(tmp_path).meets == 3
