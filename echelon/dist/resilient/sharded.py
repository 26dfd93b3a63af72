"""Store the state of a sharded model so that it survives the loss of ranks.

Each rank stores, in its own memory, its RNG states and the state that is identical on all ranks
(buffers, parameters that are not sharded, schedules). It copies its shards into memory that
outlives the rank; see `copied.py`.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from echelon.dist.fsdp.control import reshard
from echelon.dist.fsdp.moving import move, near_size_in
from echelon.dist.fsdp.parameters.unit import Unit, units_of
from echelon.dist.fsdp.states import optimizer_state, shards
from echelon.dist.fsdp.step.driver import driver_of
from echelon.dist.group import ProcessGroup
from echelon.dist.resilient.copied import CopiedState
from echelon.dist.resilient.copies.choice import Choice, Sets
from echelon.dist.resilient.copies.parts import exposed_storages, sharded_parts
from echelon.dist.resilient.copies.shards import ShardsRestore, ShardsWriter
from echelon.dist.resilient.copies.world import collected, sets_of
from echelon.dist.resilient.digest import digest
from echelon.dist.resilient.kept import KeptState, Stateful
from echelon.dist.resilient.replicas import Replicas


class ShardedState(CopiedState):
    """The state of a sharded model and its optimizer at the start of each of the last two steps.

    Args:
        model: the model.
        optimizer: the optimizer of the model's parameters.
        also: other objects whose state the steps change. Their state must be identical on all
            ranks.
        replicas: determines the number of replicas of the model in each world. None means the
            largest divisor of the number of ranks that does not exceed the initial number of
            replicas.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        also: Sequence[Stateful] = (),
        replicas: Replicas | None = None,
    ) -> None:
        super().__init__()
        self._model = model
        self._optimizer = optimizer
        self._replicas = replicas or Replicas(num_replicas_of(model))
        self._rest = [KeptState(model, optimizer, also) for _ in range(2)]
        self._syncs = [self._live_syncs() for _ in range(2)]  # if each unit reduces its gradients
        self._noted: set[int] = set()  # numbers passed as reshard_after_forward that did not fit

    @property
    def num_bytes(self) -> int:
        """The size of all copies that this rank stores, in bytes."""
        rest = sum(one.num_bytes for one in self._rest)
        return rest + sum(one.num_bytes for one in self._worlds)

    def _live_optimizer(self) -> torch.optim.Optimizer:
        return self._optimizer

    def _live_modules(self) -> Sequence[nn.Module]:
        return [self._model]

    def _sets(self, group: ProcessGroup) -> Sets:
        return sets_of(group.size, num_replicas_of(self._model))

    def keep(self, step: int, *, overlaps: bool = False) -> None:
        """Copy the state at the start of a step; see `CopiedState.keep`."""
        reshard(self._model)  # modules then refer to shards, which a move does not replace
        super().keep(step, overlaps=overlaps)

    def _keep_rest(self, turn: int) -> None:
        self._rest[turn].keep()
        self._syncs[turn] = self._live_syncs()

    def _make_writer(self) -> ShardsWriter:
        parts = sharded_parts(self._model)
        return ShardsWriter(parts, self._optimizer, exposed=exposed_storages([self._model], parts))

    def set_timeout(self, timeout_s: float) -> None:
        """Set the timeout of the groups that the sharded model has created in this world."""
        for unit in units_of(self._model):
            for group in driver_of(unit).groups():
                group.timeout_s = timeout_s

    def check_alike(self, group: ProcessGroup) -> None:
        """Check that state held by several ranks is identical on all of them. Collective.

        This state consists of everything that is not sharded, and the replicas of each shard.

        Raises:
            ValueError: a part of this state differs between ranks, or cannot be compared.
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
        """Return a hash of each shard and its optimizer state; {} if there are no replicas."""
        if num_replicas_of(self._model) == 1:
            return {}
        return {
            name: digest([shard.data, optimizer_state(self._optimizer, shard)])
            for name, shard in shards(self._model).items()
        }

    # ---- after a loss ----

    def restore_rest(self, step: int | None) -> None:
        """Restore the unsharded state that this rank has stored. Local.

        Args:
            step: a step for which this rank has stored the state; None means the newest one.
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
        """Shard the model across a new world's ranks, and restore this rank's shards. Collective.

        Raises:
            CollectiveError: a rank was lost, or a copy cannot be read.
        """
        self._forget_shards(group)
        restore = ShardsRestore(sharded_parts(self._model), self._optimizer)
        for copy in collected(self._worlds, group, choice.version, choice.holders):
            restore.add(copy)
        restore.finish()

    # ---- when a rank joins ----

    def contents(self) -> dict[str, Any]:
        """Return the state, other than the shards, that a joining rank needs; see `fill`. Local."""
        return {
            **self._rest[self._at].contents(),
            "sharding": self._sharding(),
            "syncs": self._syncs[self._at],
        }

    def fill(self, contents: dict[str, Any], step: int) -> None:
        """Adopt the unsharded state that another rank sent. Local.

        Args:
            step: the step at whose start the other rank stored this state.

        Raises:
            ValueError: the model, its sharding, the optimizer or the `also` objects do not match
                those of the other rank.
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
        """Return the parts of the state to compare after a rank joins, keyed by description."""
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
        """Shard the model across a new world's ranks without restoring values. Collective."""
        self._rest_steps = [-1, -1]
        self._forget_shards(group)

    def restore(self) -> None:
        """Restore the newest state stored since the current world began, and discard the gradients.

        Local.
        """
        reshard(self._model)
        self._rest[self._at].restore()
        self._sync_as_kept()
        for unit in self._units():
            for flat in unit.flats:
                for member in flat.members:
                    member.drop_gradient()
                    member.shard.grad = None
        restore = ShardsRestore(sharded_parts(self._model), self._optimizer)
        restore.add(self._worlds[-1].newest_own())
        restore.finish()

    def drop(self) -> None:
        """Release all copies; see `CopiedState.drop`."""
        super().drop()
        for rest in self._rest:
            rest.drop()

    def _forget_shards(self, group: ProcessGroup) -> None:
        for shard in shards(self._model).values():
            self._optimizer.state.pop(shard.parameter, None)
        move(self._model, group, self._replicas.agreed_number(group))
        self._note_near_sizes(group)

    def _note_near_sizes(self, group: ProcessGroup) -> None:
        """Warn once about each `reshard_after_forward` that does not divide the number of ranks."""
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


def num_replicas_of(model: nn.Module) -> int:
    """Return the number of replicas of a sharded model; 1 if the model is not sharded."""
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
