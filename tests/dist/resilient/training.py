"""A training that is killed at named moments, by the rank itself, and what its survivors saw."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import torch

import echelon.dist as dist
from echelon.dist import checkpoint, resilient, runtime
from echelon.dist.backends.shm import rendezvous
from echelon.dist.fsdp import fully_shard
from echelon.dist.mesh import DeviceMesh
from echelon.dist.resilient import epochs, joining, kept, sharded
from echelon.dist.resilient.copied import CopiedState
from echelon.dist.resilient.copies import copying, memory
from echelon.dist.resilient.copies import world as copies_world
from echelon.dist.resilient.training import copied as copied_training
from echelon.errors import CollectiveError, PeerLostError
from echelon.host import identity
from echelon.recorder.continuation import Epoch
from echelon.train.same_bits import SameBits, fingerprint
from tests.dist.resilient.agent import (
    introduce,
    lose,
    note_done,
    pid_of,
    wait_for_end,
    wait_until_stopped,
)
from tests.train.same_bits.model import loss_of, make

MICRO_BATCHES = 6
SAVED_STEP = 3
HALVED_STEP = 3
CHANGES_AT, FULL_FROM = 2, 5
_COPY_S = 60.0
Kill = tuple[int, str, int]  # rank, moment, step


def die(*_: object) -> None:
    """End as by a kill from outside: no handler, no clean-up."""
    os.kill(os.getpid(), signal.SIGKILL)


def train(
    rank: int, world_size: int, folder: Path, total: int, kills: list[Kill], layout: str = ""
) -> Any:
    """Train under protection; return the fingerprint and the worlds that this rank was in."""
    introduce(folder, rank)
    torch.set_num_threads(1)
    dist.init("shm", timeout_s=60)
    found = Training(rank, folder, total, kills, layout).run()
    note_done(folder, rank)
    dist.shutdown()
    return found


def train_replaced(
    rank: int,
    world_size: int,
    folder: Path,
    total: int,
    layout: str,
    hosts: list[int],
    kills: dict[int, list[Kill]],
) -> Any:
    """Train where lost ranks are replaced; return the same, and facts that steps have changed.

    Args:
        hosts: the host on which each rank believes to be; empty: all are on this one.
    """
    if hosts:
        believe_to_be_on(hosts[rank])
    introduce(folder, rank)
    torch.set_num_threads(1)
    dist.init(timeout_s=600)
    training = Training(rank, folder, total, kills[rank], layout, full=world_size)
    found = training.run()
    note_done(folder, rank)
    dist.shutdown()
    return *found, training.changed()


def train_on_hosts(
    rank: int,
    world_size: int,
    folder: Path,
    total: int,
    kills: list[Kill],
    hosts: list[int],
    layout: str = "",
) -> Any:
    """Train as ranks that believe to be on several hosts; return the same, and a rank's error."""
    believe_to_be_on(hosts[rank])
    introduce(folder, rank)
    torch.set_num_threads(1)
    group = dist.init(timeout_s=300)
    assert group.backend == "shm+gloo"
    training = Training(rank, folder, total, kills, layout)
    try:
        bits, worlds, _ = training.run()
    except CollectiveError as err:
        bits, worlds = str(err), training.worlds
    for lost, moment, _ in kills:
        if moment == "stop" and rank == 0:
            os.kill(pid_of(folder, lost), signal.SIGCONT)
    note_done(folder, rank)
    dist.shutdown()
    return bits, worlds, [step for step, _ in training.commits]


def believe_to_be_on(host: int) -> None:
    real = identity._namespace
    identity._namespace = lambda kind: host if kind == "net" else real(kind)


class Mortal:
    """A rank that dies at named moments of steps.

    A habit "slowly copied" never completes the copy of the step at whose "forward" the rank is to
    die. With "promptly copied", the rank completes its newest copy before it dies.

    Args:
        full: the number of ranks that take part in the end. From step FULL_FROM on, a step of fewer
            ranks waits until others join; before that, none do.
    """

    def __init__(
        self, rank: int, folder: Path, kills: list[Kill], habit: str = "", full: int = 0
    ) -> None:
        self.rank, self.folder, self.kills, self.habit = rank, folder, kills, habit
        self.step = -1
        self.copy_step = -1  # of the copy that the thread is making
        self.full = full
        self.newest_join = 0
        self.held: tuple[joining.Joins, Epoch] | None = None
        self.state: CopiedState | None = None

    def _begin_to_die(self, step: int) -> None:
        """Have this rank die some microseconds from now, wherever it is then."""
        for rank, moment, when in self.kills:
            delay, _, unit = moment.partition(" ")
            if (rank, unit, when) == (self.rank, "us", step):
                args = (self.folder / f"{rank}.died", int(delay) / 1e6)
                threading.Thread(target=_die_after, args=args, daemon=True).start()

    def _dies_at(self, moment: str, step: int) -> bool:
        return (self.rank, moment, step) in self.kills

    def _die_at(self, moment: str, step: int) -> None:
        if self._dies_at(moment, step):
            if self.habit == "promptly copied":
                self._complete_copy()
            die()

    def _complete_copy(self) -> None:
        """Have the newest copy stamped, as if the thread that makes it had been fast."""
        assert self.state is not None
        copying = self.state._copying
        if copying is not None:
            copying.wait_until_copied(_COPY_S)
            self.state._decide_early()
            copying.wait_until_stamped(_COPY_S)

    def _arm(self, state: type) -> None:
        """Have this rank die, or fail, inside functions of the package."""
        self._before(runtime, "leave_groups", "leaving")
        self._before(epochs.Epochs, "meet", "before the meeting")
        self._before(kept.KeptState, "restore", "restoring")
        self._before(kept.KeptState, "keep", "keeping")
        self._before(rendezvous, "exchange", "regrouping")
        self._before(copies_world.WorldCopies, "begin", "before a copy")
        self._before(copying.Copying, "run", "in a copy")
        self._note_copies()
        self._note_state()
        self._before(memory.CopyMemory, "commit", "before a copy's stamp")
        self._after(memory.CopyMemory, "commit", "after a copy's stamp")
        self._before(state, "restore_from", "restoring shards")
        self._before(state, "enter", "before new copies")
        self._before(state, "release_earlier", "after new copies")
        self._before(state, "discard_newest", "discarding")
        self._after(epochs, "arrive", "in the meeting")
        self._after(state, "check_alike", "compared")
        self._fail_behind_a_barrier()

    def _note_copies(self) -> None:
        """Note which copy the thread makes, which may be in the next step by then."""
        real = copying.Copying.run

        def run(copy: copying.Copying) -> None:
            self.copy_step = copy.step
            if self.habit == "slowly copied" and self._dies_at("forward", copy.step):
                threading.Event().wait()
            real(copy)

        copying.Copying.run = run  # type: ignore[method-assign]

    def _note_state(self) -> None:
        real = CopiedState.keep

        def keep(state: CopiedState, *args: Any, **options: Any) -> None:
            self.state = state
            real(state, *args, **options)

        CopiedState.keep = keep  # type: ignore[method-assign]

    def _number(self) -> int:
        """Return the number of the step that this thread is in, or whose result it copies."""
        is_copying = threading.current_thread().name == copying.NAME
        return self.copy_step - 1 if is_copying else self.step

    def _before(self, owner: Any, name: str, moment: str) -> None:
        real = getattr(owner, name)

        def call(*args: Any, **options: Any) -> Any:
            self._die_at(moment, self._number())
            return real(*args, **options)

        setattr(owner, name, call)

    def _after(self, owner: Any, name: str, moment: str) -> None:
        real = getattr(owner, name)

        def call(*args: Any, **options: Any) -> Any:
            found = real(*args, **options)
            self._die_at(moment, self._number())
            return found

        setattr(owner, name, call)

    def _note_joins(self) -> None:
        """Let no rank join before step FULL_FROM, so that each kill finds the join it is for."""
        self.note_join = joining.Joins.note

        def note(joins: joining.Joins, epoch: Epoch) -> None:
            self.held, self.newest_join = (joins, epoch), epoch.number
            if self.step >= FULL_FROM or not self.full:
                self.note_join(joins, epoch)

        joining.Joins.note = note  # type: ignore[method-assign]

    def _wait_for_others(self, world: resilient.World) -> None:
        """Wait until the launcher lets others join at the end of this step, or a rank is lost."""
        if self.held is not None:
            self.note_join(*self.held)
        deadline_s = time.monotonic() + 600.0
        while self.newest_join <= world.epoch and runtime.first_error() is None:
            assert time.monotonic() < deadline_s, "no rank has joined"
            time.sleep(0.002)

    def _fail_behind_a_barrier(self) -> None:
        """Have this rank learn of a death in the barrier that the others have passed."""
        real = dist.ProcessGroup.barrier

        def barrier(group: dist.ProcessGroup, *args: Any, **options: Any) -> None:
            real(group, *args, **options)
            for rank, moment, step in self.kills:
                if (moment, step) == ("barrier", self.step):
                    if rank == self.rank:
                        die()
                    elif group.rank == group.size - 1:
                        wait_for_end(pid_of(self.folder, rank))
                        raise PeerLostError(f"rank {rank} died or left", ranks=[rank])

        dist.ProcessGroup.barrier = barrier  # type: ignore[method-assign]


class Training(Mortal):
    """One rank's training, with what is to kill it.

    Its layout is "" (replicated), "sharded", "near" (sharded, and kept among two neighbors after a
    forward), or "hsdp" (two replicas where the number of ranks is even, and whole blocks are kept
    after a forward). "sharded and saved" and "hsdp and saved" also save a checkpoint. What follows
    ", " is a habit: "halved" changes the optimizer's state at the beginning of step HALVED_STEP;
    "touched" overwrites it with the same values, on rank 0 in that step, on rank 1 in the next
    one, and so on; "slowly copied" never completes the copy of the step at whose "forward" the rank
    is to die.
    """

    def __init__(
        self,
        rank: int,
        folder: Path,
        total: int,
        kills: list[Kill],
        layout: str = "",
        full: int = 0,
    ) -> None:
        layout, _, habit = layout.partition(", ")
        super().__init__(rank, folder, kills, habit, full)
        self.total = total
        self.has_stopped = False
        self.saves = layout.endswith(" and saved")
        self.has_replicas = layout.startswith("hsdp")
        self.from_checkpoint = self._load if self.saves else None
        self.model = make(seed=rank)
        if layout:
            mesh = None
            if self.has_replicas:
                mesh = DeviceMesh((2, dist.world().size // 2), ("replicate", "shard"))
            near = {"near": 2, "hsdp": 1}.get(layout.partition(" ")[0], True)
            for block in self.model.blocks:
                fully_shard(block, mesh=mesh, reshard_after_forward=near)
            fully_shard(self.model, mesh=mesh, ignored_params=[self.model.unused])
        torch.manual_seed(3)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.98)
        self.worlds: list[tuple[int, tuple[int, ...], int]] = []
        self.commits: list[tuple[int, float]] = []

    def run(self) -> tuple[str, list[Any], list[Any]]:
        self._arm(sharded.ShardedState)
        self._before(copied_training, "send_state", "sending")
        self._before(copied_training, "receive_state", "receiving")
        self._after(sharded.ShardedState, "fill", "filled")
        self._note_joins()
        resilient.run(
            self.prepare, self.model, self.optimizer, total=self.total, also=[self.scheduler],
            on_commit=lambda step, _: self.commits.append((step, time.monotonic())),
            from_checkpoint=self.from_checkpoint,
        )  # fmt: skip
        return fingerprint(self.model, self.optimizer), self.worlds, self.commits

    def prepare(self, world: resilient.World) -> Any:
        self.worlds.append((world.epoch, world.lost, world.group.size))
        kills = self.kills if self.has_replicas else []
        if self.has_replicas:
            assert sharded.num_replicas_of(self.model) == 2 - world.group.size % 2
        if world.epoch:
            self._die_at("prepare", self.step)
        same = SameBits(
            self.model, self.optimizer, micro_batches=MICRO_BATCHES, group=world.group, seed=7,
            probe=world.epoch == 0,
        )  # fmt: skip
        if world.epoch:
            torch.rand(3)  # the steps' numbers are those from before
            with torch.no_grad():
                self.model.unused.add_(1.0)

        def train_step(step: int) -> float:
            self.step = step
            if not self.full and any(
                when == step and not at.endswith(" us") for _, at, when in kills
            ):
                world.group.barrier()  # else the ranks of one replica may die before others begin
            if self.full:
                self._change(step)
                if step >= FULL_FROM and world.group.size < self.full:
                    self._wait_for_others(world)
            if self.saves and step == SAVED_STEP:
                checkpoint.save(self.folder / "checkpoint", self._state(step))
            if self.habit == "halved" and step == HALVED_STEP:
                self._scale_averages(0.5)
            if self.habit == "touched" and step == HALVED_STEP + self.rank:
                self._scale_averages(1.0)
            self._begin_to_die(step)
            loss = same.backward(step, lambda number: self.loss(world.group, number))
            same.clip_grad_norm_(0.5)
            self._die_at("before the optimizer", step)
            with torch.no_grad():
                self.model.unused.copy_(torch.rand(5))  # the same on all ranks: see `make`
            self.optimizer.step()
            self._die_at("after the optimizer", step)
            self.scheduler.step()
            return loss

        return train_step

    def _scale_averages(self, factor: float) -> None:
        for values in self.optimizer.state.values():
            values["exp_avg"].mul_(factor)

    def _change(self, step: int) -> None:
        """Change what only one step does: a rank that joins later learns it from others."""
        if step == CHANGES_AT:
            self.model.blocks[0].up.bias.requires_grad_(False)
            self.model.blocks[1].norm.eval()

    def changed(self) -> tuple[bool, bool]:
        """Return what `_change` changes."""
        return self.model.blocks[0].up.bias.requires_grad, self.model.blocks[1].norm.training

    def _state(self, step: int) -> dict[str, Any]:
        return {
            "model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler,
            "step": step, "random": torch.get_rng_state(),
        }  # fmt: skip

    def _load(self) -> int:
        state = checkpoint.load(self.folder / "checkpoint", self._state(0))
        torch.set_rng_state(state["random"])
        return int(state["step"])

    def loss(self, group: dist.ProcessGroup, number: int) -> torch.Tensor:
        step = self.step
        self._die_at("forward", step)
        if self._dies_at("exit", step):
            note_done(self.folder, self.rank)
            os._exit(0)
        self._lose_one_that_only_stopped(step)
        if self._dies_at("collective", step):
            threading.Thread(target=_die_once_waiting, args=(group,), daemon=True).start()
        for rank, moment, when in self.kills:
            if (moment, when) == ("collective", step) and rank != self.rank:
                wait_for_end(pid_of(self.folder, rank))  # it can only wait, then
        loss = loss_of(self.model, step, number, MICRO_BATCHES)
        if self._dies_at("backward", step):
            self.model.head.weight.register_hook(die)
        return loss

    def _lose_one_that_only_stopped(self, step: int) -> None:
        """Have this rank stand still, and be counted as lost, as one that is cut off."""
        for rank, moment, when in self.kills:
            if (moment, when) != ("stop", step) or self.has_stopped:
                continue
            self.has_stopped = True  # a step has several micro-batches, and is repeated
            if rank == self.rank:
                os.kill(os.getpid(), signal.SIGSTOP)
            elif self.rank == 0:
                wait_until_stopped(pid_of(self.folder, rank))
                lose(self.folder, rank)


def _die_after(stamp: Path, delay_s: float) -> None:
    time.sleep(delay_s)
    stamp.write_text(str(time.monotonic()))
    die()


def _die_once_waiting(group: dist.ProcessGroup) -> None:
    while not group.state.waits():
        time.sleep(0.001)
    die()
