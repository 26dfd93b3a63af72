"""Every computation of a pipeline is in the black box, and every wait with what it is for."""

from __future__ import annotations

import importlib
import os
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

import echelon.dist as dist
from echelon.dist.pipeline import Pipeline, Stage, schedule
from echelon.recorder.read import read_ring
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.ranks


class _Late(nn.Module):
    """Lets micro-batch 1 pass only once the next rank is known to wait for it."""

    def __init__(self, folder):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.folder = folder
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        while self.calls == 2 and not self._is_awaited():
            threading.Event().wait(0.01)
        return self.layer(x)

    def _is_awaited(self):
        record = read_ring(Path(self.folder, "rank_1", "ring"))
        return any("for 0F1 of rank 0" in record.strings[s["detail"]] for s in record.open_spans)


def _work(rank, world_size, folder):
    os.environ["ECHELON_RANK_DIR"] = f"{folder}/rank_{rank}"
    importlib.import_module("echelon.recorder.current")._opened = False  # the server's, not ours
    world = dist.init(timeout_s=60)
    module = _Late(folder) if rank == 0 else nn.Linear(2, 2)
    pipe = Pipeline(
        [Stage(module, index=rank, num_stages=2)], group=world, schedule="1f1b",
        num_microbatches=3, loss_fn=lambda y, t: (y - t).sum(),
    )  # fmt: skip
    pipe.step(torch.ones(3, 2), torch.ones(3, 2))
    dist.shutdown()


def test_actions_and_waits_are_recorded(tmp_path):
    run_ranks(_work, 2, str(tmp_path), timeout_s=60)
    rows = schedule("1f1b", 2, 3).rows
    for rank in (0, 1):
        record = read_ring(Path(tmp_path, f"rank_{rank}", "ring"))
        told = [(record.strings[s["name"]], record.strings[s["detail"]]) for s in record.spans]
        computed = [detail for name, detail in told if name == "compute"]
        assert computed == [str(action) for action in rows[rank]]
        assert len(record.open_spans) == 0
    waits = [detail for name, detail in told if name == "pipeline"]
    assert "1F1 waits in RECV_F for 0F1 of rank 0" in waits
