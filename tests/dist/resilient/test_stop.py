"""Stops and timed saves that ranks agree on, before and after one of them is lost."""

from __future__ import annotations

import os
import signal

import pytest
import torch
from torch import nn

import echelon.dist as dist
from echelon.dist import resilient, runtime
from echelon.dist.checkpoint import SaveSchedule
from tests.dist.resilient.agent import introduce, note_done, run_watched
from tests.dist.resilient.training import die

pytestmark = pytest.mark.ranks

_TOTAL = 14


def _train(rank, world_size, folder, kills, signaled, wishes):
    """Train, and return what each step was told: its epoch, its number, whether to stop or save.

    Args:
        kills: by rank, the step in which it dies.
        signaled: the rank and the step in which it gets SIGTERM, in any epoch.
        wishes: the same for a request, in epoch 0 and just before a loss.
    """
    introduce(folder, rank)
    dist.init("shm", timeout_s=60)
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule, told = SaveSchedule(every_s=1e-9), []

    def prepare(world):
        def train_step(step):
            is_told = dist.should_stop()
            told.append((world.epoch, step, is_told, schedule.due(step)))
            if kills.get(rank) == step:
                if wishes[0] not in (-1, rank):  # the others notice the death from now on
                    runtime.job_store().wait(["asked"], timeout=60)
                die()
            if (rank, step) == signaled:
                os.kill(os.getpid(), signal.SIGTERM)
            if (rank, step, world.epoch) == (*wishes, 0):
                dist.request_stop("enough")
                runtime.job_store().set("asked", "yes")
            world.group.all_reduce(torch.ones(2))

        return train_step

    resilient.run(prepare, model, optimizer, total=_TOTAL)
    reason = dist.stop_reason()
    note_done(folder, rank)
    dist.shutdown()
    return told, reason, signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def _run(tmp_path, kills, signaled=(-1, -1), wishes=(-1, -1)):
    codes = dict.fromkeys(kills, -signal.SIGKILL)
    ends, _ = run_watched(_train, 4, tmp_path, kills, signaled, wishes, exit_codes=codes)
    assert len(ends) == 4 - len(kills)
    assert all(is_default for *_, is_default in ends)  # the handler is gone only at the end
    (reason,) = {reason for _, reason, _ in ends}
    lost = list(enumerate(kills.values()))  # there a rank may fail before or after it is told
    stops = [
        [(epoch, step) for epoch, step, stop, _ in told if stop and (epoch, step) not in lost]
        for told, *_ in ends
    ]
    assert stops[0] == stops[1] == stops[-1], ends
    return stops[0], reason, [told for told, *_ in ends]


def test_a_stop_is_agreed_on_after_a_loss_and_kept_over_another(tmp_path):
    stops, reason, told = _run(tmp_path, {1: 2, 3: 8}, signaled=(2, 4))
    assert stops[0] in ((1, 5), (1, 6))
    assert [step for epoch, step in stops if epoch == 1] == list(range(stops[0][1], 8))
    again = [step for epoch, step in stops if epoch == 2]
    assert again in (list(range(8, _TOTAL)), list(range(9, _TOTAL)))
    assert reason == "rank 2: SIGTERM"
    for mine in told:  # and the schedule is due again
        assert {epoch for epoch, _, _, is_due in mine if is_due} >= {1, 2}


@pytest.mark.parametrize("asking", [0, 1], ids=["a rank that is left", "the rank that is lost"])
def test_a_stop_that_was_requested_before_a_loss_is_not_forgotten(tmp_path, asking):
    step = 3 if asking == 0 else 2  # a rank publishes its request at its next call
    stops, reason, _ = _run(tmp_path, {1: 3}, wishes=(asking, step))
    first = next(one for one in stops if one[0] == 1)
    assert first in ((1, 3), (1, 4))
    assert reason == f"rank {asking}: enough"
