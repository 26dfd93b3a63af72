"""What `run_pipeline` cannot restore is refused with one line that names it."""

from __future__ import annotations

import dataclasses
import os
import signal

import pytest
import torch
from torch import nn

import echelon.dist as dist
from echelon.dist import resilient
from echelon.dist.fsdp.parameters.slices import Slice, set_slice
from echelon.dist.mesh import DeviceMesh
from echelon.dist.pipeline import Pipeline, Stage, split
from tests.dist.resilient.agent import introduce, note_done, run_watched
from tests.support.ranks import run_ranks

_KILLED_STEP = 2


class _Program:
    """A pipeline with a stage of linear layers per rank. Rank 2 of three dies in a step.

    Args:
        habit: what is wrong with it.
    """

    def __init__(self, habit):
        self.habit = habit
        self.first = None
        self.num_built = 0

    def build(self, world):
        self.num_built += 1
        if self.habit == "nothing":
            return None
        is_later = world.epoch > 0
        if is_later and self.habit == "not again":
            return self.first
        setup = self._built(world, is_later)
        self.first = self.first or setup
        return setup

    def _built(self, world, is_later):
        size, rank = world.group.size, world.group.rank
        torch.manual_seed(0)
        layers = [nn.Linear(4, 4) for _ in range(6 if is_later or self.habit != "grows" else 5)]
        if is_later and self.habit == "shrinks":
            layers.pop()
        if is_later and self.habit == "another shape":
            layers[5] = nn.Linear(4, 3)
        if is_later and self.habit == "another dtype":
            layers[5].register_buffer("mask", torch.zeros(4, dtype=torch.int64))
        if not is_later and self.habit == "another dtype":
            layers[5].register_buffer("mask", torch.zeros(4))
        part = split(layers, size, costs=[1] * len(layers))[rank]
        if self.habit == "names":
            part = nn.Sequential(*part)
        pp, dp = world.group, None
        if self.habit.startswith("replicas"):
            mesh = DeviceMesh((1, size), ("pp", "dp"))
            pp, dp, part = mesh.group("pp"), mesh.group("dp"), split(layers, 1)[0]
        if self.habit == "replicas from other seeds":
            with torch.no_grad():
                part[1].bias.add_(rank)
        if self.habit == "replicas with statistics":
            part[1].register_buffer("mean", torch.zeros(4))
        stage = Stage(part, index=pp.rank, num_stages=pp.size)
        pipe = Pipeline(
            [stage], group=pp, replicas=dp, num_microbatches=2, loss_fn=lambda y, _: y.sum()
        )
        return resilient.PipelineSetup(pipe, *self._trained(pipe, world, is_later))

    def _trained(self, pipe, world, is_later):
        rank = world.group.rank
        named = dict(pipe.module.named_parameters())
        groups = [list(named.values())]
        if self.habit == "other groups":
            weights = [one for name, one in named.items() if name.endswith("weight")]
            biases = [one for name, one in named.items() if name.endswith("bias")]
            groups = [[*weights, *biases]] if is_later else [weights, biases]
        optimizer = torch.optim.SGD([{"params": one} for one in groups], lr=0.1)
        if len(groups) == 2:
            optimizer.param_groups[1]["lr"] = 0.2
        if self.habit == "outside":
            optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(7))]})
        if self.habit == "global state":
            optimizer.state["all"] = {"count": 1}
        also = [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]
        if self.habit == "another also" and is_later:
            also.pop()

        def train_step(step):
            if dist.world().ranks[rank] == 2 and step == _KILLED_STEP:
                os.kill(os.getpid(), signal.SIGKILL)
            data = torch.ones(2, 4)
            if self.habit == "replicas with statistics":
                pipe.stages[0].module[1].mean.add_(rank)
            pipe.step(data if pipe.has_first else None, data if pipe.has_last else None)
            optimizer.step()
            optimizer.zero_grad()
            if self.habit == "an also that drifts":
                also[0].last_epoch += rank

        return optimizer, train_step, also


def _train(rank, world_size, folder, habit):
    introduce(folder, rank)
    torch.set_num_threads(1)
    dist.init("shm", timeout_s=60)
    program = _Program(habit)
    with pytest.raises(ValueError) as raised:  # noqa: PT011 -- compared below
        resilient.run_pipeline(program.build, total=5)
    note_done(folder, rank)
    dist.shutdown()
    return str(raised.value), program.num_built


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("habit", "says"),
    [
        ("nothing", "build must return a PipelineSetup, not NoneType"),
        ("outside", "in the optimizer, but not in the pipeline: a parameter of shape [7]"),
        ("global state", "state that belongs to none of the pipeline's parameters"),
        ("names", "'0.weight' on rank 1 differs from that on rank 0: make stages with split()"),
        ("replicas from other seeds", "'1.bias' on rank 1 differs from that on rank 0"),
        ("replicas with statistics", "'1.mean' on rank 1 differs from that on rank 0"),
        ("an also that drifts", "also= on rank 1 differs from that on rank 0"),
    ],
)
def test_what_could_not_be_restored_is_refused_before_a_loss(tmp_path, habit, says):
    codes = {}
    ends, _ = run_watched(_train, 3, tmp_path, habit, exit_codes=codes)
    for error, num_built in ends:
        assert says in error
        assert "\n" not in error
        assert num_built == 1


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("habit", "says"),
    [
        ("not again", "build returned the pipeline of an earlier world"),
        ("shrinks", "but '5.bias' was float32[4] in the previous world, and is absent now"),
        ("grows", "but '5.bias' was absent in the previous world, and is float32[4] now"),
        (
            "another shape",
            "but '5.bias' was float32[4] in the previous world, and is float32[3] now",
        ),
        ("another dtype", "but '5.mask' was float32[4] in the previous world, and is int64[4] now"),
        ("another also", "but also= has 0 objects now, and had 1 in the previous world"),
        ("other groups", "into one group of the optimizer, but 'lr' was"),
    ],
)
def test_a_build_that_does_not_match_the_lost_world_is_refused(tmp_path, habit, says):
    ends, _ = run_watched(_train, 3, tmp_path, habit, exit_codes={2: -signal.SIGKILL})
    assert len(ends) == 2
    for error, num_built in ends:
        assert says in error
        assert "\n" not in error
        assert num_built == 2


def _build(world, change=None):
    layers = nn.Sequential(nn.Linear(2, 2))
    if change is not None:
        change(layers)
    pipe = Pipeline(
        [Stage(layers, index=0, num_stages=1)], num_microbatches=1, loss_fn=nn.MSELoss()
    )
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    return resilient.PipelineSetup(pipe, optimizer, lambda step: step)


def _divide(layers):
    set_slice(layers[0].weight, Slice((4, 2), dim=0, index=0, count=2))


def _expand(layers):
    layers[0].register_buffer("ones", torch.ones(1).expand(4))


def test_two_stages_of_a_rank_with_the_same_names_are_refused():
    """Only one of them would be copied."""
    dist.init()
    try:
        stages = [Stage(nn.Linear(2, 2), index=index, num_stages=2) for index in (0, 1)]
        pipe = Pipeline(
            stages, schedule="interleaved_1f1b", num_microbatches=1, loss_fn=nn.MSELoss()
        )
        optimizer = torch.optim.SGD([one for stage in stages for one in stage.module.parameters()])
        setup = resilient.PipelineSetup(pipe, optimizer, print)
        with pytest.raises(
            ValueError,
            match=r"stages 0 and 1 both have a parameter or buffer named 'weight': "
            r"make stages with",
        ):
            resilient.run_pipeline(lambda _: setup, total=1)
    finally:
        dist.shutdown()


def test_stages_are_not_a_model_for_run():
    dist.init()
    try:
        setup = _build(None)
        with pytest.raises(ValueError, match="cannot train a pipeline's stages: use run_pipeline"):
            resilient.run(lambda _: print, setup.pipe.module, setup.optimizer, total=1)
    finally:
        dist.shutdown()


def test_a_module_is_not_a_pipeline():
    dist.init()
    try:
        setup = resilient.PipelineSetup(nn.Linear(2, 2), None, print)
        with pytest.raises(ValueError, match="pipe= must be a Pipeline, not Linear"):
            resilient.run_pipeline(lambda _: setup, total=1)
    finally:
        dist.shutdown()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (_divide, "split by tensor parallelism, such as '0.weight'"),
        (_expand, r"buffer '.*ones' is expanded and cannot be restored"),
        (lambda layers: layers.to("meta"), "'0.weight' is on meta, but run_pipeline supports"),
    ],
)
def test_tensors_that_cannot_be_copied_are_refused(change, says):
    dist.init()
    try:
        with pytest.raises(ValueError, match=says):
            resilient.run_pipeline(lambda world: _build(world, change), total=1)
        setup = resilient.run_pipeline(_build, total=1)
        assert isinstance(setup.pipe, Pipeline)
    finally:
        dist.shutdown()


def test_without_protection_all_steps_are_trained_and_committed():
    dist.init()
    try:
        seen = []
        resilient.run_pipeline(
            _build, first=2, total=5, on_commit=lambda step, found: seen.append((step, found))
        )
        assert seen == [(2, 2), (3, 3), (4, 4)]
        with pytest.raises(ValueError, match="first must be at most total, got first=6 and"):
            resilient.run_pipeline(_build, first=6, total=5)
    finally:
        dist.shutdown()


def _build_two(world):
    part = split([nn.Linear(2, 2), nn.Linear(2, 2)], 2)[world.group.rank]
    stage = Stage(part, index=world.group.rank, num_stages=2)
    pipe = Pipeline([stage], num_microbatches=1, loss_fn=nn.MSELoss())
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    return resilient.PipelineSetup(pipe, optimizer, lambda step: step)


def _run_twice(rank, world_size):
    dist.init("shm", timeout_s=60)
    errors = []
    for _ in range(2):
        try:
            resilient.run_pipeline(_build_two, total=1)
        except ValueError as err:
            errors.append(str(err))
    dist.shutdown()
    return errors


@pytest.mark.ranks
def test_a_second_protected_call_is_refused():
    for errors in run_ranks(_run_twice, 2, environ={"ECHELON_ON_LOSS": "shrink"}):
        (error,) = errors
        assert "run_pipeline was already called in this process: with --on-loss shrink" in error


class _Unportable:
    """An object with a state that cannot be sent to a process that joins."""

    def state_dict(self):
        return {"seen": {1, 2}}

    def load_state_dict(self, state):
        raise AssertionError(state)


def _train_unportable(rank, world_size):
    dist.init("shm", timeout_s=60)

    def build(world):
        setup = _build_two(world)
        return dataclasses.replace(setup, also=[_Unportable()])

    with pytest.raises(
        ValueError,
        match=r"the state cannot be sent to a rank that replaces a lost one: also.*type set",
    ):
        resilient.run_pipeline(build, total=1)
    dist.shutdown()


@pytest.mark.ranks
def test_an_also_that_cannot_be_sent_is_refused_at_the_start_if_ranks_are_replaced():
    run_ranks(_train_unportable, 2, environ={"ECHELON_ON_LOSS": "replace"})
