"""A save in the background when a rank is lost: the next one does not wait for it."""

from __future__ import annotations

import signal
import threading
import warnings

import pytest
import torch
from torch import nn

import echelon.dist as dist
from echelon.dist import checkpoint, resilient
from echelon.dist.checkpoint.ranks.pending import PendingSave
from tests.dist.resilient.agent import introduce, note_done, run_watched
from tests.dist.resilient.training import die

pytestmark = pytest.mark.ranks

_LIMIT_S = 600.0  # far above that of the test


def _train(rank, world_size, folder, lost, with_keeper):
    introduce(folder, rank)
    dist.init("shm", timeout_s=_LIMIT_S)
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    keeper = checkpoint.Keeper(folder / "saved")
    if rank == lost:  # it never writes its part
        PendingSave._run = lambda *_: threading.Event().wait()

    def save(step):
        if with_keeper:
            keeper.save(step, {"model": model}, async_op=True)
        else:
            checkpoint.save(folder / "saved", {"model": model, "step": step}, async_op=True)

    def prepare(world):
        def train_step(step):
            if (rank, step) == (lost, 3):
                die()
            world.group.all_reduce(torch.ones(2))
            if step in (1, 4):
                save(step)

        return train_step

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        resilient.run(prepare, model, optimizer, total=6)
        note_done(folder, rank)
        dist.shutdown()
    keeper.close()
    return [str(one.message) for one in caught if "not saved" in str(one.message)]


@pytest.mark.parametrize(
    ("lost", "with_keeper"), [(1, False), (0, True)], ids=["a writer", "the one that commits"]
)
def test_the_next_save_continues_without_a_part_that_is_lost(tmp_path, lost, with_keeper):
    ends, _ = run_watched(
        _train, 3, tmp_path, lost, with_keeper, exit_codes={lost: -signal.SIGKILL}
    )
    said, other = ends
    (line,) = said
    assert f"because rank {lost} was lost" in line
    assert other == []
    if with_keeper:
        assert str(checkpoint.newest(tmp_path / "saved")).endswith("step_00000004")
    else:
        assert checkpoint.load(tmp_path / "saved", {"step": None})["step"] == 4
