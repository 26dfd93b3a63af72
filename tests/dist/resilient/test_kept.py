"""The copy of a step's start: what a step changes is undone, and nothing is replaced."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import nn

from echelon.dist.resilient.kept import KeptState
from echelon.train.same_bits import fingerprint


class _Training:
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.5)
        self.kept = KeptState(self.model, self.optimizer, [self.schedule])

    def step(self) -> float:
        """Compute a step that uses all random numbers; return its loss."""
        noise = random.random() + np.random.rand()
        loss = self.model(torch.randn(8, 4)).square().mean() * noise
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.schedule.step()
        return float(loss.detach())

    def state(self) -> tuple[str, float]:
        lr = self.optimizer.param_groups[0]["lr"]
        return fingerprint(self.model, self.optimizer), lr


@pytest.mark.parametrize("num_steps", [0, 2])
def test_a_step_is_undone_and_gives_the_same_again(num_steps):
    """Also the first step, which makes the optimizer's state."""
    training = _Training()
    for _ in range(num_steps):
        training.step()
    training.kept.keep()
    before, objects = training.state(), [id(one) for one in training.model.parameters()]
    losses, after = [], set()
    for _ in range(2):
        losses.append(training.step())
        after.add(training.state())
        training.kept.restore()
        assert training.state() == before
        assert all(one.grad is None for one in training.model.parameters())
    assert losses[0] == losses[1]
    assert len(after) == 1
    assert before not in after
    assert [id(one) for one in training.model.parameters()] == objects


def test_a_later_copy_uses_the_memory_of_the_one_before():
    training = _Training()
    training.step()
    training.kept.keep()
    places = {kept.data_ptr() for _, kept in training.kept._tensors}
    training.step()
    training.kept.keep()
    assert {kept.data_ptr() for _, kept in training.kept._tensors} == places
    values = [one for state in training.optimizer.state.values() for one in state.values()]
    tensors = [*training.model.parameters(), *training.model.buffers(), *values]
    assert training.kept.num_bytes == sum(one.numel() * one.element_size() for one in tensors)
    training.kept.drop()
    assert training.kept.num_bytes == 0


def test_tensors_that_a_step_assigns_or_resizes_are_those_from_before_again():
    training = _Training()
    module, scale = training.model[0], nn.Parameter(torch.ones(1))
    module.register_buffer("average", torch.zeros(3))
    module.register_buffer("unset", None)
    module.register_buffer("grows", torch.zeros(2))
    training.optimizer.add_param_group({"params": [scale]})
    weight = module.weight
    training.kept.keep()
    module.average = module.average + 1
    module.unset = torch.ones(2)
    module.grows.resize_(5)
    module.weight = nn.Parameter(torch.zeros(3, 4))
    with torch.no_grad():
        scale.add_(1.0)
    training.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    training.kept.restore()
    assert (module.average.tolist(), module.unset, module.grows.tolist()) == (
        [0] * 3,
        None,
        [0] * 2,
    )
    assert module.weight is weight
    assert scale.tolist() == [1.0], "only the optimizer has it"
    assert len(training.optimizer.param_groups) == 2


def test_modules_and_parameters_that_a_step_freezes_are_trained_again():
    training = _Training()
    training.model[2].bias.requires_grad_(False)
    training.kept.keep()
    training.model.eval()
    training.model[0].weight.requires_grad_(False)
    training.model[2].bias.requires_grad_(True)
    training.kept.restore()
    assert all(module.training for module in training.model.modules())
    trains = [name for name, one in training.model.named_parameters() if one.requires_grad]
    assert trains == ["0.weight", "0.bias", "1.weight", "1.bias", "2.weight"]


@pytest.mark.parametrize("key", [nn.Parameter(torch.ones(2)), "global"], ids=["tensor", "text"])
def test_optimizer_state_outside_its_groups_cannot_be_sent_and_says_so(key):
    training = _Training()
    training.optimizer.state[key] = {"x": torch.ones(2)}
    training.kept.keep()
    with pytest.raises(ValueError, match="state that belongs to none of its parameter groups"):
        training.kept.contents()


def test_optimizer_state_outside_its_groups_is_compared_too():
    training = _Training()
    extra = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    for one in extra:
        training.optimizer.state[one] = {"x": torch.ones(2)}
    training.kept.keep()
    before = str(training.kept.parts())
    for one in extra:
        training.optimizer.state[one]["x"].fill_(2)
        training.kept.keep()
        assert str(training.kept.parts()) != before
        training.optimizer.state[one]["x"].fill_(1)
