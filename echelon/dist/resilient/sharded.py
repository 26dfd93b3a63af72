"""Keep the state of a sharded model so that the state survives the loss of ranks.

Each rank keeps its own copy of the state that is equal on all ranks (buffers, parameters that are
not sharded, schedules), and of the state of its random generators. Each rank copies its shards into
memory that outlives the rank. The last two states are kept, so that one of them is always complete.

[Note: copying while a step computes] Between two steps of the optimizer, no other code writes to
its state, which is the larger part of what is copied. A thread therefore copies that state while
the next step computes. A hook of the optimizer waits for the thread. The end of the step waits for
it as well, because the ranks must know then that all copies are complete. Parameters are copied
before the step begins.

A program may nevertheless change the optimizer's state earlier in a step. torch counts the changes
of each tensor. The counts are compared when the thread has copied the tensors, and again when the
optimizer begins. If one differs, the copy is void. Each step ends with the minimum, over all ranks,
of the step of their newest complete copy. If the newest copy of any rank is void, the next copies
overwrite the newest ones on all ranks, so the copies of the step before are kept. A rank whose copy
was void no longer copies while a step computes.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from echelon.dist.fsdp.control import reshard
from echelon.dist.fsdp.moving import move, near_size_in
from echelon.dist.fsdp.parameters.unit import Unit, units_of
from echelon.dist.fsdp.states import optimizer_state, shards
from echelon.dist.fsdp.step.driver import driver_of
from echelon.dist.group import ProcessGroup
from echelon.dist.resilient.copies.choice import Choice, Offer, Version, choose
from echelon.dist.resilient.copies.copying import Copying
from echelon.dist.resilient.copies.shards import ShardsRestore, ShardsWriter
from echelon.dist.resilient.copies.world import WorldCopies, collected, sets_of
from echelon.dist.resilient.digest import digest
from echelon.dist.resilient.kept import KeptState, Stateful
from echelon.dist.resilient.replicas import Replicas
from echelon.errors import CollectiveError

_CLOSE_S = 5.0  # for a thread whose step has failed


class ShardedState:
    """The state of a sharded model and its optimizer at the start of each of the last two steps.

    Args:
        model: the model.
        optimizer: the optimizer of the model's parameters.
        also: other objects whose state the steps change. Their state must be equal on all ranks.
        replicas: how many replicas of the model a world has; None means one, or as many as now.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        also: Sequence[Stateful] = (),
        replicas: Replicas | None = None,
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._replicas = replicas or Replicas(num_replicas_of(model))
        self._rest = [KeptState(model, optimizer, also) for _ in range(2)]
        self._rest_steps = [-1, -1]
        self._syncs = [self._live_syncs() for _ in range(2)]  # if each unit reduces its gradients
        self._at = 0  # the newest of them
        self._noted: set[int] = set()  # numbers passed as reshard_after_forward that did not fit
        self._worlds: list[WorldCopies] = []  # the last is the current one
        self._copying: Copying | None = None  # the newest copy, until it is complete
        self._writer: ShardsWriter | None = None  # of that copy, until the optimizer begins
        self._may_overlap = True
        self._is_void = False  # the newest copy
        self._hook: RemovableHandle | None = None

    @property
    def num_bytes(self) -> int:
        """The size of all copies that this rank keeps, in bytes."""
        rest = sum(one.num_bytes for one in self._rest)
        return rest + sum(one.num_bytes for one in self._worlds)

    def enter(self, group: ProcessGroup, epoch: int) -> None:
        """Prepare for copies in a new world, and keep the copies of earlier worlds. Collective."""
        self._worlds.append(WorldCopies(group, epoch, num_replicas_of(self._model)))

    def keep(self, step: int, *, overlaps: bool = False) -> None:
        """Copy the state at the start of a step.

        Args:
            overlaps: whether a thread may copy the optimizer's state while the step computes; see
                [Note: copying while a step computes]. `finish` must then end the step.

        Raises:
            CollectiveError: a partner was lost.
            OSError: the host has no memory left for the copies.
        """
        assert self._copying is None, self._copying.step
        self._is_void = False
        reshard(self._model)  # modules then refer to shards, which a move does not replace
        turn = 1 - self._at
        self._rest_steps[turn] = -1
        self._rest[turn].keep()
        self._syncs[turn] = self._live_syncs()
        self._rest_steps[turn] = step
        self._at = turn
        writer = ShardsWriter(self._model, self._optimizer)
        copying = self._worlds[-1].begin(writer, step)
        if not (overlaps and self._may_overlap):
            copying.run()
            return
        if self._hook is None:
            self._hook = self._optimizer.register_step_pre_hook(self._before_optimizer)
        self._copying, self._writer = copying, writer
        copying.start()

    def finish(self) -> int:
        """Wait until this rank's newest copy is complete, and return the step of the copy.

        If the copy is void, the step before is returned.

        Raises:
            CollectiveError: a partner was lost, or the copy takes too long.
            OSError: the host has no memory left for the copies.
        """
        self._before_optimizer()
        copying, self._copying = self._copying, None
        if copying is not None:
            copying.wait(self._worlds[-1].timeout_s)
        return self._rest_steps[1 - self._at if self._is_void else self._at]

    def stop(self, timeout_s: float) -> None:
        """Wait for the thread that copies, after its step was abandoned. Its error is dropped.

        Raises:
            CollectiveError: the thread has not ended after `timeout_s`.
        """
        if self._copying is not None:
            self._copying.wait_until_ended(timeout_s)
            self._copying = None
            self._check_unchanged()

    def discard_newest(self) -> None:
        """Have the next copy overwrite the newest one, which is void on some rank."""
        self._rest_steps[self._at] = -1
        self._at = 1 - self._at
        self._worlds[-1].discard_newest()

    def _before_optimizer(self, *_: object) -> None:
        if self._writer is None or self._copying is None or not self._copying.is_here:
            return  # in a forked child, it is not: the child does not have its parent's thread
        self._copying.wait_until_copied(self._worlds[-1].timeout_s)
        self._check_unchanged()

    def _check_unchanged(self) -> None:
        """Void the newest copy if its source has changed since the copy began."""
        writer, self._writer = self._writer, None
        changed = "" if writer is None else writer.changed()
        if changed:
            self._is_void, self._may_overlap = True, False
            self._worlds[-1].void_newest()
            warnings.warn(
                f"a step changed {changed} before optimizer.step, while it was being copied: from "
                "now on, this rank begins a step only when its copy is complete",
                RuntimeWarning,
                stacklevel=2,
            )

    def set_timeout(self, timeout_s: float) -> None:
        """Set the timeout of the groups that the sharded model has made in this world."""
        for unit in units_of(self._model):
            for group in driver_of(unit).groups():
                group.timeout_s = timeout_s

    def release_earlier(self) -> None:
        """Release the copies of earlier worlds. Call this once this world's copies are complete."""
        for one in self._worlds[:-1]:
            one.close()
        del self._worlds[:-1]

    def check_alike(self, group: ProcessGroup) -> None:
        """Check that all state that should be equal on several ranks is. Collective.

        This is all state that is not sharded, and shards of which there are replicas.

        Raises:
            ValueError: a part differs between ranks, or cannot be compared.
        """
        mine = {what: digest(value) for what, value in self._rest[self._at].parts().items()}
        rows, shards_rows = zip(*group.all_gather_object((mine, self._digests())), strict=True)
        for what, found in mine.items():
            if any(row.get(what) != found for row in rows):
                raise ValueError(
                    f"resilient.run with a sharded model needs all other state to be identical on "
                    f"all ranks, because state that exists only on a lost rank could not be "
                    f"restored: {what} differs"
                )
        for alike in sets_of(group.size, num_replicas_of(self._model)):
            _check_replicas([group.ranks[place] for place in alike], shards_rows, alike)

    def _digests(self) -> dict[str, str]:
        """Return a hash of each shard and its optimizer's state if there are replicas of it."""
        if num_replicas_of(self._model) == 1:
            return {}
        return {
            name: digest([shard.data, optimizer_state(self._optimizer, shard)])
            for name, shard in shards(self._model).items()
        }

    # ---- after a loss ----

    def offers(self, survivors: Sequence[int]) -> dict[str, Any]:
        """Return the copies that this rank can read, in the form that `choice_of` expects."""
        offers = [
            (one.version.epoch, one.version.step, one.owner)
            for world in self._worlds
            for one in world.offers(survivors)
            if one.owner != world.own_rank or one.version.step in self._rest_steps
        ]
        return {
            "offers": offers,
            "sets": [(one.epoch, one.sets) for one in self._worlds],
            "steps": [step for step in self._rest_steps if step >= 0],
        }

    def restore_rest(self, step: int | None) -> None:
        """Restore the unsharded state that this rank kept. Local.

        Args:
            step: one of the steps for which this rank has kept the state; None means the last one.
        """
        if step is not None:
            self._at = self._rest_steps.index(step)
        self._rest[self._at].restore()
        self._sync_as_kept()

    def _live_syncs(self) -> list[bool]:
        return [unit.entry.sync for unit in self._units()]

    def _sync_as_kept(self) -> None:
        for unit, sync in zip(self._units(), self._syncs[self._at], strict=True):
            unit.entry.sync = sync

    def restore_from(self, choice: Choice, group: ProcessGroup) -> None:
        """Divide the model among a new world's ranks and restore their shards. Collective.

        Raises:
            CollectiveError: a rank was lost, or a copy cannot be read.
        """
        self._forget_shards(group)
        restore = ShardsRestore(self._model, self._optimizer)
        for copy in collected(self._worlds, group, choice.version, choice.holders):
            restore.add(copy)
        restore.finish()

    # ---- when a rank joins ----

    def contents(self) -> dict[str, Any]:
        """Return the state that a joining rank needs besides the shards; see `fill`. Local."""
        return {
            **self._rest[self._at].contents(),
            "sharding": self._sharding(),
            "syncs": self._syncs[self._at],
        }

    def fill(self, contents: dict[str, Any], step: int) -> None:
        """Adopt the state, other than shards, that another rank has restored. Local.

        Args:
            step: the step at whose start the other rank kept this state.

        Raises:
            ValueError: the model, its sharding, the optimizer or `also` does not match.
        """
        if contents["sharding"] != self._sharding():
            raise ValueError("the model is sharded differently from the other ranks' models")
        self._syncs[self._at] = contents["syncs"]
        self._sync_as_kept()
        rest = self._rest[self._at]
        rest.fill(contents)
        rest.restore()
        rest.keep()  # what `also` has made of it is compared
        self._rest_steps[self._at] = step

    def joined_parts(self) -> dict[str, Any]:
        """Return the state that a joining rank has received, keyed by description."""
        return self._rest[self._at].joined_parts()

    def _units(self) -> list[Unit]:
        return sorted(units_of(self._model), key=lambda unit: unit.number)

    def _sharding(self) -> list[Any]:
        """Return the settings that determine the units' collectives, except the number of ranks."""
        return [self._replicas.initial, self._unit_facts()]

    def _unit_facts(self) -> list[Any]:
        names = {one.parameter: name for name, one in shards(self._model).items()}
        return [
            [
                unit.entry.reshard, unit.near_size, unit.entry.depth, unit.entry.outer,
                repr(unit.precision), driver_of(unit).order.budget.num_bytes,
                [
                    [str(flat.dtype), str(flat.compute_dtype), str(flat.reduce_dtype), [
                        [names.get(one.shard), list(one.piece.shape)] for one in flat.members
                    ]]
                    for flat in unit.flats
                ],
            ]
            for unit in self._units()
        ]  # fmt: skip

    # ---- after all copies of a shard are lost ----

    def restart(self, group: ProcessGroup) -> None:
        """Divide the model among a new world's ranks, without restoring its values. Collective."""
        self._rest_steps = [-1, -1]
        self._forget_shards(group)

    def restore(self) -> None:
        """Restore the last state that was kept in this world, and drop the gradients. Local."""
        reshard(self._model)
        self._rest[self._at].restore()
        self._sync_as_kept()
        for unit in self._units():
            for flat in unit.flats:
                for member in flat.members:
                    member.drop_gradient()
                    member.shard.grad = None
        restore = ShardsRestore(self._model, self._optimizer)
        restore.add(self._worlds[-1].newest_own())
        restore.finish()

    def close(self) -> None:
        """Stop copying, and leave the optimizer as it was. Safe to call twice."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
        with contextlib.suppress(CollectiveError):  # it ends with its group
            self.stop(_CLOSE_S)

    def drop(self) -> None:
        """Release all copies, which are not needed once this rank is the only one left."""
        self.close()
        for one in self._worlds:
            one.close()
        self._worlds.clear()
        for rest in self._rest:
            rest.drop()

    def _forget_shards(self, group: ProcessGroup) -> None:
        for shard in shards(self._model).values():
            self._optimizer.state.pop(shard.parameter, None)
        move(self._model, group, self._replicas.agreed_number(group))
        self._note_near_sizes(group)

    def _note_near_sizes(self, group: ProcessGroup) -> None:
        """Warn once of each `reshard_after_forward` that does not divide the ranks' number."""
        for unit in units_of(self._model):
            size = unit.flats[0].group.size if unit.flats else 0
            if unit.near_size and size % unit.near_size and unit.near_size not in self._noted:
                self._noted.add(unit.near_size)
                if group.rank == 0:
                    warnings.warn(
                        f"reshard_after_forward={unit.near_size} does not evenly divide the "
                        f"{size} ranks that now share the parameters: using "
                        f"{near_size_in(unit.near_size, size) or True} until it does",
                        RuntimeWarning,
                        stacklevel=2,
                    )


def choice_of(rows: Mapping[int, Mapping[str, Any]]) -> Choice:
    """Return the state that the survivors restore.

    Args:
        rows: the result of `ShardedState.offers` on each survivor.

    Raises:
        CopiesLostError: no state is complete.
    """
    offers = {
        rank: [Offer(Version(step, epoch), owner) for epoch, step, owner in row["offers"]]
        for rank, row in rows.items()
    }
    sets = {int(epoch): found for row in rows.values() for epoch, found in row["sets"]}
    return choose(offers, sets)


def num_replicas_of(model: nn.Module) -> int:
    """Return the number of replicas of a sharded model; 1 if it is not sharded."""
    for unit in units_of(model):
        replicas = driver_of(unit).replicas
        return 1 if replicas is None else replicas.size
    return 1


def _check_replicas(
    ranks: Sequence[int], rows: Sequence[Mapping[str, str]], places: Sequence[int]
) -> None:
    first = rows[places[0]]
    for rank, place in zip(ranks, places, strict=True):
        for name, found in rows[place].items():
            if found != first[name]:
                raise ValueError(
                    f"resilient.run restores a lost shard from any replica, but the shard of "
                    f"{name!r} on rank {rank} differs from its replica on rank {ranks[0]}"
                )
