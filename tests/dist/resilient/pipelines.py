"""A training of a pipeline that is killed at named moments, and what its survivors saw."""

from __future__ import annotations

import time
import warnings
import weakref
from pathlib import Path
from typing import Any

import torch

import echelon.dist as dist
from echelon.dist import checkpoint, resilient
from echelon.dist.resilient import joining
from echelon.dist.resilient.stages.state import StagesState
from echelon.dist.resilient.training import copied as copied_training
from echelon.errors import CollectiveError
from echelon.train.same_bits import fingerprint
from tests.dist.resilient.agent import introduce, note_done
from tests.dist.resilient.training import FULL_FROM, Kill, Mortal, believe_to_be_on
from tests.train.same_bits.staged import Layout, make_staged

MICRO_BATCHES = 6
SAVED_STEP = 3
FROZEN_STEP = 2
_TWO_EACH = "interleaved_1f1b"
# How the model is divided on each number of ranks. The names of kinds are for tests.
LAYOUTS = {
    "pipeline": {
        1: Layout("replicated", 2, _TWO_EACH),
        2: Layout("replicated", 4, "zbv"),  # rank 0 has the first and the last stage
        3: Layout("replicated", 3, "gpipe"),
        4: Layout("replicated", 4),
        5: Layout("replicated", 5),
    },
    "replicas": {
        1: Layout("replicated", 2, _TWO_EACH),
        2: Layout("replicated", 1),
        3: Layout("replicated", 1),
        4: Layout("replicated", 4, _TWO_EACH),
        5: Layout("replicated", 1),
        6: Layout("replicated", 3),
    },
    "shards": {
        1: Layout("replicated", 2, _TWO_EACH),
        2: Layout("sharded", 2),
        3: Layout("sharded", 1),
        4: Layout("sharded", 2),
        5: Layout("sharded", 1),
        6: Layout("sharded", 3),
    },
}


def train(
    rank: int,
    world_size: int,
    folder: Path,
    total: int,
    kills: list[Kill],
    kind: str = "pipeline",
    hosts: tuple[int, ...] = (),
) -> Any:
    """Train under protection; return the bits, worlds, committed steps, and warnings.

    Args:
        kind: a key of LAYOUTS, and then ", " and a habit: "saved" saves a checkpoint in step
            SAVED_STEP, and loads it if copies are lost; the others are those of `Mortal`. Both
            together are "saved, slowly copied".
        hosts: the host on which each rank believes to be; empty: all are on this one.

    Returns:
        In the place of the bits, the text of a CollectiveError or ValueError.
    """
    if hosts:
        believe_to_be_on(hosts[rank])
    introduce(folder, rank)
    torch.set_num_threads(1)
    dist.init(timeout_s=300)
    training = PipelineTraining(rank, folder, total, kills, kind)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        try:
            bits = training.run()
        except (CollectiveError, ValueError) as err:
            bits = f"{type(err).__name__}: {err}"
    note_done(folder, rank)
    dist.shutdown()
    return bits, training.worlds, training.commits, [str(one.message) for one in seen]


def train_replaced(
    rank: int,
    world_size: int,
    folder: Path,
    total: int,
    kind: str,
    hosts: tuple[int, ...],
    kills: dict[int, list[Kill]],
) -> Any:
    """Train where lost ranks are replaced; return the bits, worlds and committed steps."""
    if hosts:
        believe_to_be_on(hosts[rank])
    introduce(folder, rank)
    torch.set_num_threads(1)
    dist.init(timeout_s=600)
    training = PipelineTraining(rank, folder, total, kills[rank], kind, full=world_size)
    bits = training.run()
    note_done(folder, rank)
    dist.shutdown()
    return bits, training.worlds, training.commits


class PipelineTraining(Mortal):
    """One rank's training, with what is to kill it."""

    def __init__(
        self,
        rank: int,
        folder: Path,
        total: int,
        kills: list[Kill],
        kind: str,
        full: int = 0,
    ) -> None:
        kind, _, habit = kind.partition(", ")
        self.saves = habit.startswith("saved")
        super().__init__(rank, folder, kills, habit.removeprefix("saved, "), full)
        self.layouts, self.total = LAYOUTS[kind], total
        self.from_checkpoint = self._load if self.saves else None
        self.worlds: list[tuple[int, tuple[int, ...], int]] = []
        self.commits: list[tuple[int, float]] = []
        self.num_forwards = 0  # in this step
        self.timeout_s = dist.world().timeout_s
        self.built: weakref.ref[Any] | None = None  # the newest pipeline

    def run(self) -> str:
        self._arm(StagesState)
        self._before(checkpoint, "load", "loading")
        self._before(copied_training, "send_state", "sending")
        self._before(copied_training, "receive_state", "receiving")
        self._after(StagesState, "fill", "filled")
        self._note_joins()
        self._before(joining.Joins, "end_step_with", "end of the step")
        setup = resilient.run_pipeline(
            self.build, total=self.total, from_checkpoint=self.from_checkpoint,
            on_commit=lambda step, _: self.commits.append((step, time.monotonic())),
        )  # fmt: skip
        return fingerprint(setup.pipe, setup.optimizer)

    def build(self, world: resilient.World) -> resilient.PipelineSetup[float]:
        if world.epoch:
            self._die_at("before build", self.step)
            assert self.built is None or self.built() is None, "two models would need memory"
        settings = {"micro_batches": MICRO_BATCHES, "seed": 7, "probe": world.epoch == 0}
        size = world.group.size
        pipe, optimizer, same, compute = make_staged(size, self.layouts[size], settings)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
        self._watch(pipe)
        if world.epoch and self.full:
            assert pipe.group.timeout_s > self.timeout_s, "others may still build their stages"
        self.built = weakref.ref(pipe.stages[0].module)
        self.worlds.append((world.epoch, world.lost, size))
        if world.epoch:
            self._die_at("after build", self.step)
            with torch.no_grad():
                for one in pipe.parameters():
                    one.add_(1.0)  # what is built after a loss is overwritten
            torch.rand(3)

        def train_step(step: int) -> float:
            self.step, self.num_forwards = step, 0
            assert pipe.group.timeout_s == pipe.replicas.timeout_s == self.timeout_s
            if self.full and step >= FULL_FROM and size < self.full:
                self._wait_for_others(world)
            if not self.full and any(when == step for _, _, when in self.kills):
                world.group.barrier()  # else a rank may die before others begin
            if self.saves and step == SAVED_STEP:
                state = self._state(pipe, optimizer, schedule, step)
                checkpoint.save(self.folder / "checkpoint", state)
            if step == FROZEN_STEP:
                for stage in pipe.stages:
                    _freeze(stage.module)
            self._begin_to_die(step)
            loss = same.backward(step, compute(step))
            same.clip_grad_norm_(0.5)
            self._die_at("before the optimizer", step)
            drawn = torch.rand(3)  # the same on all ranks
            for stage in pipe.stages:
                for buffer in stage.module.buffers():
                    buffer.mul_(0.5).add_(drawn)
            optimizer.step()
            self._die_at("after the optimizer", step)
            schedule.step()
            return loss

        return resilient.PipelineSetup(pipe, optimizer, train_step, also=[schedule])

    def _state(self, pipe: Any, optimizer: Any, schedule: Any, step: int) -> dict[str, Any]:
        return {
            "model": pipe, "optimizer": optimizer, "schedule": schedule, "step": step,
            "random": torch.get_rng_state(),
        }  # fmt: skip

    def _load(self, setup: resilient.PipelineSetup[float]) -> int:
        state = self._state(setup.pipe, setup.optimizer, setup.also[0], 0)
        state = checkpoint.load(self.folder / "checkpoint", state)
        torch.set_rng_state(state["random"])
        for stage in setup.pipe.stages:
            _freeze(stage.module)  # which no checkpoint has
        return int(state["step"])

    def _watch(self, pipe: Any) -> None:
        """Have this rank die in a forward pass, or between two of them, or in a backward pass."""

        def forward(*_: object) -> None:
            self.num_forwards += 1
            if self.num_forwards == 1:
                self._die_at("forward", self.step)
            else:
                self._die_at("between micro-batches", self.step)

        def backward(_module: object, _inputs: object, output: torch.Tensor) -> None:
            output.register_hook(lambda _: self._die_at("backward", self.step))

        for stage in pipe.stages:
            stage.module.register_forward_pre_hook(forward)
            stage.module.register_forward_hook(backward)


def _freeze(module: torch.nn.Module) -> None:
    """Freeze what the other ranks could not know of stages that they build later."""
    for name, one in module.named_modules():
        if name == "3":
            one.up.bias.requires_grad_(False)
            one.norm.eval()
