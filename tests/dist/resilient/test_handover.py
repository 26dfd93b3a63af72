"""The state that a rank receives when it joins, without a process: messages in a list."""

from __future__ import annotations

import enum
import math
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple

import numpy as np
import pytest
import torch
from torch import nn

from echelon.dist.resilient.handover import check_alike, receive_state, send_state
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


class _Hashes:
    """A group of rank 3, 5 and 7 whose other members have reported hashes of their states."""

    def __init__(self, rank: int, states: list[dict]) -> None:
        self.rank, self.ranks, self._states = rank, (3, 5, 7), states

    def all_gather_object(self, mine):
        rows = []
        for state in self._states:
            group = _Gather()
            _compared(group, state)
            rows.append(group.mine)
        assert mine == rows[self.rank]
        return rows


class _Gather:
    """A group of one rank, which keeps what the rank reports."""

    rank, ranks = 0, (0,)

    def all_gather_object(self, mine):
        self.mine = mine
        return [mine]


def _compared(group, state, source=0, newcomers=()) -> None:
    check_alike(group, source, newcomers, state)


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
    send_state(group, 0, kept.contents)
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


def _ordered():
    """As a module's state_dict: the versions of its classes are an attribute."""
    found = OrderedDict([("b", 1), ("a", 2)])
    found._metadata = OrderedDict({"": {"version": 2}})
    return found


def _handed_over(value):
    group = _Group()
    send_state(group, 0, lambda: {"also": [{"value": value}]})
    found = receive_state(group, 0)["also"][0]["value"]
    assert not group.messages
    return found


@pytest.mark.parametrize(
    "value",
    [
        np.float32(0.1), np.float64(0.1), np.int8(-3), np.bool_(True), np.str_("ab"),
        np.datetime64("2026-01-02"), np.array(3.0), np.arange(3, dtype=">f4"),
        np.array(["a", "bc"]), np.arange(4, dtype=np.uint16).reshape(2, 2), np.empty((0, 3)),
        np.arange(3, dtype=np.longdouble), Counter({30: 1, 60: 2}), _ordered(), {(1, 2): [3, (4,)]},
        {np.int64(2): 1}, torch.Size([2, 3]), -0.0, 5e-324, 2**80, -(2**63), True, None, b"ab", "",
        {}, [], (),
    ],
    ids=repr,
)  # fmt: skip
def test_a_value_arrives_with_its_type(value):
    """A float32 that became a float would be rounded elsewhere from then on."""
    found = _handed_over(value)
    assert type(found) is type(value)
    if isinstance(value, np.ndarray):
        assert (found.dtype.str, found.shape) == (value.dtype.str, value.shape)
        assert found.flags.writeable
        assert np.array_equal(found, value)
        return
    assert found == value
    assert repr(found) == repr(value)
    assert getattr(found, "__dict__", {}) == getattr(value, "__dict__", {})
    if isinstance(value, dict):
        assert [type(key) for key in found] == [type(key) for key in value]


@pytest.mark.parametrize(
    "value",
    [
        torch.tensor(2.0), torch.ones(1).expand(4), torch.rand(3, 2).t(), torch.empty(0, 3),
        torch.rand(3, dtype=torch.complex64).conj(), torch.ones(4).to(torch.float8_e4m3fn),
        torch.ones(2, requires_grad=True), nn.Parameter(torch.ones(2)),
        nn.Parameter(torch.ones(2), requires_grad=False),
    ],
    ids=range(9),
)  # fmt: skip
def test_a_tensor_arrives_as_it_was(value):
    found = _handed_over(value)
    assert type(found) is type(value)
    assert (found.dtype, found.requires_grad) == (value.dtype, value.requires_grad)
    assert found.tolist() == value.tolist()


def test_a_tensor_that_occurs_twice_is_sent_once():
    shared = torch.rand(3)
    one, two = _handed_over([shared, shared])
    assert one is two


_Pair = namedtuple("_Pair", "one two")  # noqa: PYI024
_Color = enum.IntEnum("_Color", ["RED"])
_LOOP: list = []
_LOOP.append(_LOOP)


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (defaultdict(int), r"also\[0\]\['value'\] has type defaultdict"),
        (_Pair(1, 2), "has type _Pair"),
        ({1}, "has type set"),
        ([deque()], r"\['value'\]\[0\] has type deque"),
        (_Color.RED, "has type _Color"),
        (np.array([None]), "has dtype object"),
        (np.zeros(2, "i4,f4"), "has dtype"),
        (torch.eye(3).to_sparse(), "is a sparse, quantized or meta tensor"),
        (torch.empty(2, device="meta"), "is a sparse, quantized or meta tensor"),
        (_LOOP, "contains itself"),
        ("\ud800", "surrogates not allowed"),
    ],
    ids=range(11),
)
def test_a_value_that_would_arrive_as_another_is_refused(value, says):
    with pytest.raises(ValueError, match=says):
        _handed_over(value)


def test_a_state_that_cannot_be_made_is_refused_where_it_is_missing():
    group = _Group()
    send_state(group, 0, lambda: math.inf["tensors"])
    with pytest.raises(ValueError, match="this rank cannot join: 'float' object"):
        receive_state(group, 0)


def test_a_rank_that_joins_trains_the_same_modules_and_parameters():
    """The others may have frozen some of them in an earlier step."""
    model, *_, kept = _made(1, 1, 0)
    model[1].eval()
    model[0].bias.requires_grad_(False)
    kept.keep()
    other, *_, its_kept = _made(2, 0, 0)
    other.train()
    its_kept.fill(kept.contents())
    its_kept.restore()
    assert [one.training for one in other.modules()] == [True, True, False, True]
    assert [one.requires_grad for one in other.parameters()] == [
        one.requires_grad for one in model.parameters()
    ]
    its_kept.keep()
    assert not other[0].bias.requires_grad
    _compared(
        _Hashes(1, [one.joined_parts() for one in (kept, its_kept, kept)]),
        its_kept.joined_parts(),
        newcomers=[1],
    )


def test_groups_of_an_optimizer_that_have_other_parameters_are_refused():
    model, optimizer, _, kept = _made(1, 0, 0)
    kept.keep()
    contents = kept.contents()
    optimizer.add_param_group({"params": [optimizer.param_groups[0]["params"].pop()]})
    with pytest.raises(ValueError, match="the optimizer's groups differ"):
        kept.fill(contents)
    assert model is not None


def test_a_rank_that_has_received_another_state_does_not_join():
    """The others have what they need, and continue."""
    sent, received = {"also": [np.float32(1)], "x": 1}, {"also": [1.0], "x": 1}
    states = [sent, received, sent]
    with pytest.raises(ValueError, match="this rank cannot join: also differs from what was sent"):
        _compared(_Hashes(1, states), received, newcomers=[1])
    for rank in (0, 2):
        _compared(_Hashes(rank, states), sent, newcomers=[1])


def test_ranks_with_different_parameters_are_not_joined_by_another():
    one, other = {"parameter 'a'": torch.zeros(2)}, {"parameter 'a'": torch.ones(2)}
    says = "parameter 'a' of rank 3 differs on other ranks .7."
    for rank, error in enumerate((ValueError, CollectiveError, ValueError)):
        with pytest.raises(error, match=says):  # the rank that would join is not at fault
            _compared(_Hashes(rank, [one, one, other]), [one, one, other][rank], newcomers=[1])


def test_one_rank_warns_of_what_each_rank_has_for_itself():
    """Such as the statistics of a BatchNorm: the rank that joins has those of the sender."""
    one, other = {"buffer 'mean'": torch.zeros(2)}, {"buffer 'mean'": torch.ones(2)}
    with pytest.warns(RuntimeWarning, match="buffer 'mean' of rank 3 differs on other ranks"):
        _compared(_Hashes(0, [one, one, other]), one, newcomers=[1])
    _compared(_Hashes(2, [one, one, other]), other, newcomers=[1])


def test_a_state_that_cannot_be_sent_is_refused_where_it_is_missing():
    """The rank that would send it goes on training."""
    *_, kept = _made(1, 0, object())
    kept.keep()
    group = _Group()
    send_state(group, 0, kept.contents)
    with pytest.raises(
        ValueError, match=r"cannot join: also\[0\]\['value'\] has type object, where only"
    ):
        receive_state(group, 0)
    assert not group.messages


def test_a_state_that_was_damaged_on_its_way_is_refused():
    *_, kept = _made(1, 1, 0)
    kept.keep()
    group = _Group()
    send_state(group, 0, kept.contents)
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
    with pytest.raises(CollectiveError, match="none of the remaining ranks holds"):
        places_of([{"joins": True}])
