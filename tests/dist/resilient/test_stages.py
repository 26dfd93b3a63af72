"""Which rank holds what of a pipeline, and stages that are filled with what others have held."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import echelon.dist as dist
from echelon.dist import resilient
from echelon.dist.pipeline import Pipeline, Stage
from echelon.dist.resilient.copies.shards import (
    IncompleteCopiesError,
    ShardsReader,
    ShardsRestore,
    ShardsWriter,
)
from echelon.dist.resilient.stages.facts import Facts, facts_of
from echelon.dist.resilient.stages.layout import Holding, Layout
from echelon.dist.resilient.stages.setup import parts_of


def _held(start, length, shape=(6,), stage=0):
    return Holding(shape, "float32", start, length, stage)


@pytest.mark.parametrize(
    ("rows", "sets", "shared"),
    [
        ([{"a": _held(0, 6)}, {"b": _held(0, 6)}], [[0], [1]], []),
        ([{"a": _held(0, 6)}, {"a": _held(0, 6)}], [[0, 1]], ["'a'"]),
        ([{"a": _held(0, 6)}, {"a": _held(0, 6, stage=1)}], [[0], [1]], ["'a'"]),
        ([{"a": _held(0, 4)}, {"a": _held(4, 2)}], [[0], [1]], []),
        (
            [{"a": _held(0, 4)}, {"a": _held(4, 2)}, {"a": _held(0, 4)}, {"a": _held(4, 2)}],
            [[0, 2], [1, 3]],
            ["'a', elements 0 to 3,", "'a', elements 4 to 5,"],
        ),
        ([{"a": _held(0, 6)}, {"a": _held(6, 0)}, {"a": _held(6, 0)}], [[0], [1, 2]], []),
        ([{"a": _held(0, 1, ())}, {"e": _held(0, 0, (0, 3))}], [[0], [1]], []),
    ],
)
def test_ranks_with_the_same_parts_form_a_set(rows, sets, shared):
    layout = Layout(rows, range(len(rows)))
    assert layout.sets == sets
    assert sorted(layout.shared.values()) == shared


def test_stages_without_tensors_are_told_apart():
    """Whether a dropout is active is in a copy, too."""
    assert Layout([{}, {}, {}], range(3), [[1], [2], [1]]).sets == [[0, 2], [1]]


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([{"a": _held(0, 4)}], r"no rank holds elements 4 to 5 of 'a'"),
        ([{"a": _held(2, 4)}], r"no rank holds elements 0 to 1 of 'a'"),
        ([{"a": _held(0, 2)}, {"a": _held(4, 2)}], r"no rank holds elements 2 to 3 of 'a'"),
        ([{"a": _held(0, 6)}, {"a": _held(0, 3)}], r"different parts of 'a' that overlap"),
        (
            [{"a": _held(0, 6)}, {"a": _held(0, 6, (2, 3))}],
            r"'a' is float32\[6\] on rank 4, but float32\[2, 3\] on rank 7: make stages with",
        ),
    ],
)
def test_a_model_that_is_not_there_once_is_refused(rows, says):
    with pytest.raises(ValueError, match=says):
        Layout(rows, (4, 7))


@pytest.fixture
def world():
    group = dist.init()
    yield group
    dist.shutdown()


def _setup(modules, prefixes=("", ""), lrs=(0.1, 0.2)):
    """A pipeline of stages on one rank; weights and biases have groups of their own."""
    stages = [
        Stage(one, index=index, num_stages=len(modules), prefix=prefix)
        for index, (one, prefix) in enumerate(zip(modules, prefixes, strict=False))
    ]
    schedule = "1f1b" if len(stages) == 1 else "interleaved_1f1b"
    pipe = Pipeline(stages, schedule=schedule, num_microbatches=1, loss_fn=nn.MSELoss())
    named = list(pipe.module.named_parameters())
    groups = [
        {"params": [one for name, one in named if name.endswith(end)], "lr": lr}
        for end, lr in zip(("weight", "bias"), lrs, strict=True)
    ]
    optimizer = torch.optim.AdamW(groups)
    return resilient.PipelineSetup(pipe, optimizer, print)


def _train(setup):
    for number, parameter in enumerate(setup.pipe.parameters()):
        parameter.grad = torch.full_like(parameter, number + 1.0)
    setup.optimizer.step()


def _copied(setup):
    parts = parts_of(setup.pipe.stages)
    writer = ShardsWriter(parts, setup.optimizer, exposed=set(), facts=facts_of(setup))
    vector = torch.empty(writer.num_bytes, dtype=torch.uint8)
    writer.write(vector)
    return vector


def _fill(setup, vectors):
    restore, facts = ShardsRestore(parts_of(setup.pipe.stages), setup.optimizer), Facts()
    for one in vectors:
        facts.add(restore.add(one).facts)
    restore.finish()
    facts.apply(setup)


def _content(setup):
    """Return parameters, buffers, the optimizer's state, and what trains, by name."""
    found = {}
    for stage in setup.pipe.stages:
        for name, one in stage.module.named_parameters():
            state = copy.deepcopy(setup.optimizer.state[one])
            found[stage.prefix + name] = [one.detach().clone(), one.requires_grad, state]
        found |= {stage.prefix + name: [one.clone()] for name, one in stage.module.named_buffers()}
    return found


def _check_equal(found, expected):
    assert str(sorted(found.items())) == str(sorted(expected.items()))


def _conv(channels, *, is_last):
    conv = nn.Conv2d(channels, channels, 2, bias=is_last)
    if not is_last:
        conv = conv.to(memory_format=torch.channels_last)
    return conv


def test_stages_are_filled_by_name_from_other_stages(world):
    """Two stages become one, with prefixes, buffers of any dtype, and tensors of any strides."""
    torch.manual_seed(0)
    first = nn.ModuleDict({"conv": _conv(3, is_last=False), "norm": nn.BatchNorm2d(3)})
    second = nn.ModuleDict({"conv": _conv(3, is_last=True)})
    first["norm"].num_batches_tracked.fill_(7)
    first["norm"].weight.requires_grad_(False)
    first["norm"].eval()
    old = _setup([first, second], ("a.", "b."))
    _train(old)
    old.optimizer.param_groups[1]["lr"] = 0.5
    vectors = [_copied(_half(old, index)) for index in (0, 1)]
    whole = nn.ModuleDict({
        "a": nn.ModuleDict({"conv": _conv(3, is_last=False), "norm": nn.BatchNorm2d(3)}),
        "b": nn.ModuleDict({"conv": _conv(3, is_last=True)}),
    })  # fmt: skip
    new = _setup([whole])
    new.optimizer.param_groups[0]["betas"] = (0.1, 0.2)
    _train(new)
    _fill(new, [vectors[1], vectors[0], vectors[0]])
    _check_equal(_content(new), _content(old))
    assert [group["lr"] for group in new.optimizer.param_groups] == [0.1, 0.5]
    assert new.optimizer.param_groups[0]["betas"] == (0.9, 0.999)
    assert not whole["a"]["norm"].training
    assert whole["a"]["conv"].training
    weight = whole["a"]["conv"].weight
    assert weight.is_contiguous(memory_format=torch.channels_last)
    assert new.optimizer.state[weight]["exp_avg"].stride() == weight.stride()


def _half(setup, index):
    """Return a setup with one of the stages, as a rank has it that holds no other."""
    pipe = copy.copy(setup.pipe)
    pipe.stages = [setup.pipe.stages[index]]
    own = set(pipe.stages[0].module.parameters())
    optimizer = copy.copy(setup.optimizer)
    optimizer.param_groups = [
        {**group, "params": [one for one in group["params"] if one in own]}
        for group in setup.optimizer.param_groups
    ]
    return resilient.PipelineSetup(pipe, optimizer, print)


def test_a_parameter_with_two_names_is_found_under_each_of_them(world):
    """Stages on one rank may share a parameter that stages on two ranks have twice."""
    shared = nn.Linear(2, 2)
    old = _setup([nn.ModuleDict({"x": shared, "y": shared})])
    _train(old)
    alone = nn.ModuleDict({"y": nn.Linear(2, 2)})
    new = _setup([alone])
    _fill(new, [_copied(old)])
    assert torch.equal(alone["y"].weight, shared.weight)
    step = new.optimizer.state[alone["y"].bias]["step"]
    assert step == 1


def test_a_group_without_parameters_here_has_the_settings_that_others_gave_it(world):
    """Else a schedule would continue from other values than those of the other ranks."""
    old = _setup([nn.Linear(2, 2)])
    old.optimizer.param_groups[1]["lr"] = 0.01
    new = _setup([nn.Linear(2, 2, bias=False)])
    _fill(new, [_copied(old)])
    assert [group["lr"] for group in new.optimizer.param_groups] == [0.1, 0.01]


def test_a_tensor_that_no_copy_has_is_named(world):
    old, new = _setup([nn.Linear(2, 2, bias=False)]), _setup([nn.Linear(2, 2)])
    with pytest.raises(IncompleteCopiesError, match="the copies hold 0 of 2 elements of 'bias'"):
        _fill(new, [_copied(old)])


def test_modules_of_one_name_that_differ_are_left_as_they_were_built(world):
    """Stages without a prefix are all called "", as the whole model."""
    old = _setup([nn.Sequential(nn.Linear(2, 2)), nn.Sequential(nn.Linear(2, 2))], ("a.", "b."))
    halves = [_half(old, index) for index in (0, 1)]
    for half in halves:
        half.pipe.stages[0].prefix = ""
    halves[0].pipe.stages[0].module.training = False
    new = _setup([nn.Sequential(nn.Linear(2, 2))])
    facts = Facts()
    for half in halves:
        facts.add(facts_of(half))
    facts.apply(new)
    assert new.pipe.stages[0].module.training


def test_a_setting_that_cannot_be_copied_is_named(world):
    setup = _setup([nn.Linear(2, 2)])
    setup.optimizer.param_groups[1]["scale"] = print
    with pytest.raises(ValueError, match=r"groups of the optimizer.*'scale'\] has type builtin"):
        _copied(setup)


def test_a_copy_lists_only_data(world):
    setup = _setup([nn.Linear(2, 2)])
    facts = ShardsReader(_copied(setup)).index.facts
    assert facts["trains"] == {"weight": True, "bias": True}
    assert [names for _, names in facts["groups of the optimizer"]] == [["weight"], ["bias"]]
