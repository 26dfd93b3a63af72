"""The state that a rank receives when it joins, without a process: messages in a list."""

from __future__ import annotations

from collections import deque

import numpy as np
import pytest
import torch
from torch import nn

from echelon.dist.resilient.handover import receive_state, send_state
from echelon.dist.resilient.joining import Joins, is_newcomer, places_of
from echelon.dist.resilient.kept import KeptState
from echelon.errors import CollectiveError
from echelon.recorder.continuation import Epoch


class _Group:
    """A group whose only channel delivers what was sent."""

    def __init__(self) -> None:
        self.messages: deque[np.ndarray] = deque()
        self.newest: list[int] = []

    def channel(self, peer: int, name: str) -> _Group:
        return self

    def send(self, x) -> None:
        self.messages.append(np.asarray(x).copy())

    def recv(self, x) -> None:
        np.asarray(x)[...] = self.messages.popleft()

    def all_reduce(self, x, op: str) -> None:
        x[:] = min(x[0], *self.newest)

    def barrier(self) -> None:
        self.newest.append(-1)


class _Counter:
    """Something with state of its own."""

    def __init__(self, value) -> None:
        self.value = value

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state) -> None:
        self.value = state["value"]


def _made(seed: int, num_steps: int, counter):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Linear(2, 2, dtype=torch.float32))
    model[2].weight = model[0].weight.__class__(torch.rand(2, 2, dtype=torch.bfloat16))
    optimizer = torch.optim.AdamW(model[:2].parameters(), lr=0.1, betas=(0.8, 0.9))
    for _ in range(num_steps):
        model[:2](torch.rand(4, 3)).sum().backward()
        optimizer.step()
        optimizer.param_groups[0]["lr"] *= 0.5
    also = _Counter(counter)
    return model, optimizer, also, KeptState(model, optimizer, [also])


def test_a_rank_that_joins_has_the_state_of_the_other_bit_for_bit():
    counter = (1, 2**80, [0.1, None], {"x": torch.arange(3), 5: np.array([1.5, 2.5])})
    model, optimizer, _, kept = _made(1, 3, counter)
    kept.keep()
    drawn = torch.rand(4), np.random.rand(2)
    group = _Group()
    send_state(group, 0, kept.contents())
    other, its_optimizer, its_also, its_kept = _made(2, 0, None)
    parameters = list(other.parameters())
    its_kept.fill(receive_state(group, 0))
    its_kept.restore()
    assert not group.messages
    assert all(one is two for one, two in zip(parameters, other.parameters(), strict=True))
    for (name, one), two in zip(
        model.state_dict().items(), other.state_dict().values(), strict=True
    ):
        assert torch.equal(one, two), name
    mine, its = optimizer.state_dict(), its_optimizer.state_dict()
    assert mine["param_groups"] == its["param_groups"]
    assert type(its["param_groups"][0]["betas"]) is tuple
    for key, values in mine["state"].items():
        for name, value in values.items():
            assert torch.equal(value, its["state"][key][name]), (key, name)
    assert its_also.value[:3] == counter[:3]
    assert torch.equal(its_also.value[3]["x"], torch.arange(3))
    assert its_also.value[3][5].tolist() == [1.5, 2.5]
    assert torch.equal(torch.rand(4), drawn[0])
    assert np.array_equal(np.random.rand(2), drawn[1])


def test_a_state_that_cannot_be_sent_is_refused_where_it_is_missing():
    """The rank that would send it goes on training."""
    *_, kept = _made(1, 0, object())
    kept.keep()
    group = _Group()
    send_state(group, 0, kept.contents())
    with pytest.raises(ValueError, match="this rank cannot join: the state: cannot save an object"):
        receive_state(group, 0)
    assert not group.messages


def test_a_state_that_was_damaged_on_its_way_is_refused():
    *_, kept = _made(1, 1, 0)
    kept.keep()
    group = _Group()
    send_state(group, 0, kept.contents())
    group.messages[2].view(np.uint8)[0] ^= 1  # the first tensor's
    with pytest.raises(CollectiveError, match="was damaged on its way"):
        receive_state(group, 0)


def test_another_model_is_refused():
    *_, kept = _made(1, 1, 0)
    kept.keep()
    other = nn.Linear(3, 2)
    mine = KeptState(other, torch.optim.AdamW(other.parameters()), [_Counter(0)])
    with pytest.raises(ValueError, match="parameters and buffers differ"):
        mine.fill(kept.contents())


def test_a_rank_enters_an_epoch_once_all_have_seen_it():
    joins, group = Joins(is_on=True), _Group()
    group.newest = [2, 3]
    joins.note(Epoch(number=2, roster=(0, 1), lost=(), joins=(1,)))
    assert joins.end_step(group, 1) == 2
    assert joins.end_step(group, 2) == 0, "it has been entered"
    group.newest = [2, 1]
    assert joins.end_step(group, 1) == 0, "one rank has not seen it"


def test_without_replacements_a_step_ends_with_a_barrier():
    group = _Group()
    assert Joins(is_on=False).end_step(group, 0) == 0
    assert group.newest == [-1]


def test_the_lowest_rank_with_the_state_hands_it_over():
    rows = [{"joins": True}, {"kept": 3}, {"joins": True}, {"kept": 3}]
    assert [is_newcomer(row) for row in rows] == [True, False, True, False]
    assert places_of(rows) == (1, [0, 2])
    with pytest.raises(CollectiveError, match="no rank is left that holds the training state"):
        places_of([{"joins": True}])
