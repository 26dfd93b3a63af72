"""Store the state of a pipeline's stages so that it survives the loss of ranks.

Each rank copies the parameters, buffers and optimizer state of its stages into memory that outlives
the rank; see `copied.py`. The copies use the names of the whole model, so that stages built on
other ranks can be restored from them. Each rank stores, in its own memory, its RNG states and the
state that is identical on all ranks, such as schedules.
"""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from echelon.dist.fsdp.control import reshard
from echelon.dist.group import ProcessGroup
from echelon.dist.pipeline import Pipeline
from echelon.dist.resilient.copied import CopiedState
from echelon.dist.resilient.copies.choice import Choice, Sets
from echelon.dist.resilient.copies.parts import Part, exposed_storages
from echelon.dist.resilient.copies.shards import ShardsRestore, ShardsWriter
from echelon.dist.resilient.copies.world import collected
from echelon.dist.resilient.digest import digest
from echelon.dist.resilient.kept import random_state, set_random_state
from echelon.dist.resilient.stages.facts import Facts, facts_of
from echelon.dist.resilient.stages.layout import CURE, Layout
from echelon.dist.resilient.stages.setup import PipelineSetup, check_setup, parts_of


@dataclass(frozen=True, slots=True)
class _Rest:
    """The part of the state that a rank stores in its own memory."""

    also: list[dict[str, Any]]
    random: dict[str, Any]


class StagesState(CopiedState):
    """The state of this rank's stages at the start of each of the last two steps."""

    def __init__(self) -> None:
        super().__init__()
        self._setup: PipelineSetup[Any] | None = None
        self._layout: Layout | None = None  # of the newest world
        self._rest: list[_Rest | None] = [None, None]

    @property
    def setup(self) -> PipelineSetup[Any]:
        """The program's training objects for the current world."""
        assert self._setup is not None
        return self._setup

    def forget(self) -> Callable[[], Pipeline | None]:
        """Release the training objects of the previous world, to free memory for the next world.

        Returns:
            A weak reference to the previous world's pipeline.
        """
        self.close()
        if self._setup is None:
            return lambda: None
        before = weakref.ref(self._setup.pipe)
        self._setup = None
        gc.collect()  # the objects of a pipeline refer to each other
        return before

    def adopt(self, setup: PipelineSetup[Any]) -> None:
        """Check and adopt the training objects of a new world. Local.

        Raises:
            ValueError: a part of the objects' state cannot be restored.
        """
        check_setup(setup)
        self._setup = setup

    def agree(self, group: ProcessGroup) -> None:
        """Exchange descriptions of the parts of the model that each rank holds. Collective.

        Raises:
            ValueError: the stages do not form the whole model, or the model has changed since the
                previous world.
            CollectiveError: a rank was lost.
        """
        stages = [stage.index for stage in self.setup.pipe.stages]
        layout = Layout.agreed(self._parts(), stages, group)
        if self._layout is not None:
            layout.check_same_model(self._layout)
        self._layout = layout

    def _parts(self) -> dict[str, Part]:
        return parts_of(self.setup.pipe.stages)

    def _live_optimizer(self) -> torch.optim.Optimizer:
        return self.setup.optimizer

    def _live_modules(self) -> Sequence[nn.Module]:
        return [stage.module for stage in self.setup.pipe.stages]

    def _sets(self, group: ProcessGroup) -> Sets:  # noqa: ARG002 -- of the layout's group
        assert self._layout is not None
        return self._layout.sets

    def keep(self, step: int, *, overlaps: bool = False) -> None:
        """Copy the state at the start of a step; see `CopiedState.keep`.

        Raises:
            ValueError: the optimizer has state for a tensor that is not in the pipeline.
        """
        for stage in self.setup.pipe.stages:
            reshard(stage.module)
        super().keep(step, overlaps=overlaps)

    def _keep_rest(self, turn: int) -> None:
        also = [copy.deepcopy(one.state_dict()) for one in self.setup.also]
        self._rest[turn] = _Rest(also, random_state())

    def _make_writer(self) -> ShardsWriter:
        setup, parts = self.setup, self._parts()
        known = {part.tensor for part in parts.values()}
        if not setup.optimizer.state.keys() <= known:
            raise ValueError(
                "the optimizer has state that belongs to none of the pipeline's parameters and "
                "therefore cannot be restored if a rank is lost"
            )
        exposed = exposed_storages(self._live_modules(), parts)
        return ShardsWriter(parts, setup.optimizer, exposed=exposed, facts=facts_of(setup))

    def check_alike(self, group: ProcessGroup) -> None:
        """Check that state held by several ranks is identical on all of them. Collective.

        This state consists of the `also` objects and of all parts that more than one rank holds.

        Raises:
            ValueError: a part of this state differs between ranks, or cannot be compared.
        """
        rest = self._rest[self._at]
        assert rest is not None
        assert self._layout is not None
        mine: dict[str, Any] = {"also=": [digest(rest.also), -1]}
        state = self.setup.optimizer.state
        for part in self._parts().values():
            what = self._layout.shared.get((part.name, part.start, part.length))
            if what is not None:
                found = digest([part.data, dict(state.get(part.tensor, {}))])
                mine[what] = [found, part.stage]
        seen: dict[str, tuple[int, str, int]] = {}
        for rank, row in zip(group.ranks, group.all_gather_object(mine), strict=True):
            for what, (found, stage) in row.items():
                first, expected, first_stage = seen.setdefault(what, (rank, found, stage))
                if found != expected:
                    raise ValueError(
                        f"resilient.run_pipeline needs state that several ranks hold to be "
                        f"identical on them, because any of them may be lost: {what} on rank "
                        f"{rank} differs from that on rank {first}"
                        + ("" if stage == first_stage else f": {CURE}")
                    )

    # ---- after a loss ----

    def restore_rest(self, step: int | None) -> None:
        """Restore the state of the `also` objects and the RNG states. Local.

        Raises:
            ValueError: `build` did not return the same number of `also` objects as before.
        """
        if step is not None:
            self._at = self._rest_steps.index(step)
        rest, also = self._rest[self._at], self.setup.also
        assert rest is not None
        if len(rest.also) != len(also):
            raise ValueError(
                f"build must return the same also= in every world, but also= has {len(also)} "
                f"objects now, and had {len(rest.also)} in the previous world"
            )
        for one, kept in zip(also, rest.also, strict=True):
            one.load_state_dict(copy.deepcopy(kept))
        set_random_state(rest.random)

    def restore_from(self, choice: Choice, group: ProcessGroup) -> None:
        """Restore the stages and the optimizer of a new world from copies. Collective.

        Raises:
            ValueError: `build` put parameters with different settings into one parameter group.
            CollectiveError: a rank was lost, or a copy cannot be read.
        """
        restore, facts = ShardsRestore(self._parts(), self.setup.optimizer), Facts()
        for one in collected(self._worlds, group, choice.version, choice.holders):
            facts.add(restore.add(one).facts)
        restore.finish()
        facts.apply(self.setup)
        for parameter in self.setup.pipe.parameters():
            parameter.grad = None

    # ---- when a rank joins ----

    def select(self, step: int) -> None:
        """Select the step whose state `contents` returns. Local."""
        self._at = self._rest_steps.index(step)

    def contents(self) -> dict[str, Any]:
        """Return the state of the `also` objects and the RNG states. Local."""
        rest = self._rest[self._at]
        assert rest is not None
        return {"also": rest.also, "random": rest.random}

    def fill(self, contents: dict[str, Any], step: int) -> None:
        """Store the state that `contents` returned on another rank. Local.

        The stages are built later.
        """
        self._at, self._rest_steps = 0, [step, -1]
        self._rest = [_Rest(contents["also"], contents["random"]), None]

    def joined_parts(self) -> dict[str, Any]:
        """Return the state of the `also` objects, to be compared across ranks after a join."""
        rest = self._rest[self._at]
        assert rest is not None
        return {"also=": rest.also}

    # ---- after all copies of a stage are lost ----

    def restart(self, group: ProcessGroup) -> None:  # noqa: ARG002 -- of sharded models
        """Discard all stored states before the program loads a checkpoint. Local."""
        self._rest_steps = [-1, -1]

    def restore(self) -> None:
        """Restore only the RNG states, because no other state has changed since it was stored."""
        rest = self._rest[self._at]
        assert rest is not None
        set_random_state(rest.random)

    def drop(self) -> None:
        """Release all copies; see `CopiedState.drop`."""
        super().drop()
        self._rest = [None, None]
