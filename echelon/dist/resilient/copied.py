"""Store copies of a rank's state at the start of each of the last two steps, for use after a loss.

The parts of the model that only some ranks hold are copied, together with their optimizer state,
into memory that outlives the rank; see `copies/`. The rest of a rank's state is copied into the
rank's own memory. Two states are stored, so that one of them is always complete.

[Note: copying while a step computes] The optimizer's state makes up most of the data to copy, and
only the optimizer's step writes to it. A background thread therefore copies that state while the
next step computes. A hook makes the optimizer wait for the thread. The end of the step also waits
for the thread, because all copies must be complete by then. Parameters are copied before the step
begins.

A program might nevertheless change the optimizer's state earlier in a step. torch increments a
tensor's version counter after each change. The training thread compares the counters after the
background thread has copied the tensors: at the next event of a forward or backward pass of a
sharded unit, at the next forward pass of a stage, or when the optimizer's step begins. At these
points, the program is between two operations, so every change has been counted. Only after this
comparison does the background thread stamp the copy and send it to the rank's partner, which is a
rank on another host or in another container. The counters are compared again when the optimizer's
step begins. If a counter has changed, the copy is void. Each step ends with an all-reduce that
returns the minimum, over all ranks, of the step of the newest complete copy. If the newest copy of
any rank is void, the next copies overwrite the newest ones on all ranks, and the copies of the
previous step are retained.

After a void copy, a rank no longer copies while a step computes. It still exchanges copies on the
background thread. If the training thread exchanged them, the rank could deadlock with its partner:
the partner might not send its own copy until it reaches an event in its forward pass, and might be
waiting for this rank before that event.
"""

from __future__ import annotations

import contextlib
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from echelon.dist.fsdp.parameters.unit import units_of
from echelon.dist.fsdp.step.driver import driver_of
from echelon.dist.group import ProcessGroup
from echelon.dist.operation import arrays
from echelon.dist.resilient.copies.choice import Choice, Offer, Sets, Version, choose
from echelon.dist.resilient.copies.copying import Copying
from echelon.dist.resilient.copies.shards import ShardsWriter
from echelon.dist.resilient.copies.world import WorldCopies
from echelon.errors import CollectiveError

_CLOSE_S = 5.0  # for an exchange whose step has failed


class CopiedState(ABC):
    """The state of this rank at the start of each of the last two steps."""

    def __init__(self) -> None:
        self._rest_steps = [-1, -1]  # of what this rank keeps in its own memory
        self._at = 0  # the newest of them
        self._worlds: list[WorldCopies] = []  # the last is the current one
        self._copying: Copying | None = None  # the newest copy, until it is complete
        self._writer: ShardsWriter | None = None  # of that copy, until the optimizer begins
        self._may_overlap = True
        self._is_void = False  # the newest copy
        self._hooks: list[RemovableHandle] = []

    # ---- what a kind of model defines ----

    @abstractmethod
    def _live_optimizer(self) -> torch.optim.Optimizer:
        """Return the optimizer of the current world."""

    @abstractmethod
    def _live_modules(self) -> Sequence[nn.Module]:
        """Return the current world's modules that contain the parts to copy."""

    @abstractmethod
    def _sets(self, group: ProcessGroup) -> Sets:
        """Divide the ranks of a group into sets whose ranks hold the same parts of the model."""

    @abstractmethod
    def _make_writer(self) -> ShardsWriter:
        """Return a writer for the parts of the model that this rank holds."""

    @abstractmethod
    def _keep_rest(self, turn: int) -> None:
        """Copy to slot `turn` (0 or 1) all state that `_make_writer` does not cover.

        The slots are in this rank's own memory.
        """

    @abstractmethod
    def restore_rest(self, step: int | None) -> None:
        """Restore the state that this rank has stored in its own memory. Not collective.

        Args:
            step: a step for which this rank has stored the state; None means the newest one.
        """

    @abstractmethod
    def restore_from(self, choice: Choice, group: ProcessGroup) -> None:
        """Restore this rank's parts of the model in a new world. Collective.

        Raises:
            CollectiveError: a rank was lost, or a copy cannot be read.
        """

    @abstractmethod
    def restart(self, group: ProcessGroup) -> None:
        """Discard all stored states before the program loads a checkpoint. Collective."""

    @abstractmethod
    def check_alike(self, group: ProcessGroup) -> None:
        """Check that state held by several ranks is identical on all of them. Collective.

        Raises:
            ValueError: a part of this state differs between ranks, or cannot be compared.
        """

    @abstractmethod
    def restore(self) -> None:
        """Restore the newest state that was stored in this world. Local."""

    @abstractmethod
    def contents(self) -> dict[str, Any]:
        """Return the state that a joining rank needs besides the copies; see `fill`.

        Not collective.
        """

    @abstractmethod
    def fill(self, contents: dict[str, Any], step: int) -> None:
        """Adopt the state that `contents` returned on another rank. Local.

        Args:
            step: the step at whose start the other rank stored this state.

        Raises:
            ValueError: the state does not match this rank's objects.
        """

    @abstractmethod
    def joined_parts(self) -> dict[str, Any]:
        """Return the state that is compared across ranks after a join, keyed by description."""

    # ---- while training ----

    def enter(self, group: ProcessGroup, epoch: int) -> None:
        """Prepare to make copies in a new world; retain earlier worlds' copies. Collective."""
        self._worlds.append(WorldCopies(group, epoch, self._sets(group)))

    def keep(self, step: int, *, overlaps: bool = False) -> None:
        """Copy the state at the start of a step.

        Args:
            overlaps: True if a thread is allowed to copy the optimizer's state while the step
                computes; see [Note: copying while a step computes]. The step must then end with
                `finish`.

        Raises:
            CollectiveError: a rank that exchanges copies with this rank was lost.
            OSError: the host has no memory left for the copies.
        """
        assert self._copying is None, self._copying.step
        self._is_void = False
        turn = 1 - self._at
        self._rest_steps[turn] = -1
        self._keep_rest(turn)
        self._rest_steps[turn] = step
        self._at = turn
        writer, world = self._make_writer(), self._worlds[-1]
        copying = world.begin(writer, step)
        optimizer = self._live_optimizer()
        may_overlap = self._may_overlap and _calls_hooks(optimizer)
        if not overlaps or (not may_overlap and world.is_one_place):
            copying.run()
            return
        self._copying = copying
        if not may_overlap:
            copying.copy()
            copying.start()
            return
        if not self._hooks:
            self._hooks.append(_hooked_first(optimizer, self._before_optimizer))
            for module in self._live_modules():
                if not units_of(module):  # else the units tell
                    self._hooks.append(
                        module.register_forward_pre_hook(self._decide_early, prepend=True)
                    )
        if copying.start():
            self._writer = writer
            self._listen(writer)

    def finish(self) -> int:
        """Wait until this rank's newest copy is complete, and return the copy's step.

        If the copy is void, return the step of the previous copy.

        Raises:
            CollectiveError: a rank that exchanges copies with this rank was lost, or the copy takes
                too long.
            OSError: the host has no memory left for the copies.
        """
        self._before_optimizer()
        if self._copying is not None:
            self._copying.wait(self._worlds[-1].timeout_s)
            self._copying = None  # only now: after an error, `stop` waits for the thread
        return self._rest_steps[1 - self._at if self._is_void else self._at]

    def stop(self, timeout_s: float) -> None:
        """Wait until the copying thread of an abandoned step has ended; ignore the thread's error.

        Raises:
            CollectiveError: the thread has not ended after `timeout_s` seconds.
        """
        copying = self._copying
        if copying is not None and copying.is_here:
            try:
                copying.wait_until_copied(timeout_s)
            except CollectiveError:
                copying.decide(is_void=True)  # no one is left to decide it later
                raise
            self._check_unchanged(timeout_s)
            copying.wait_until_ended(timeout_s)
        if self._writer is not None:  # in a forked child
            self._listen(None)
        self._copying = self._writer = None

    def discard_newest(self) -> None:
        """Make the next copy overwrite the newest copy, which is void on some rank."""
        self._rest_steps[self._at] = -1
        self._at = 1 - self._at
        self._worlds[-1].discard_newest()

    def _before_optimizer(self, *_: object) -> None:
        if self._writer is None or self._copying is None or not self._copying.is_here:
            return  # in a forked child, it is not: the child does not have its parent's thread
        timeout_s = self._worlds[-1].timeout_s
        self._copying.wait_until_copied(timeout_s)
        self._check_unchanged(timeout_s)

    def _decide_early(self, *_: object) -> None:
        """If the copying thread has read this rank's state, tell it whether the copy is void.

        Called between two operations of a step.
        """
        copying, writer = self._copying, self._writer
        if copying is None or writer is None or not copying.is_here or not copying.needs_decision:
            return
        copying.decide(is_void=bool(writer.changed()))

    def _listen(self, writer: ShardsWriter | None) -> None:
        """Observe the units' events, and the collectives that write to tensors being copied.

        If `writer` is None, stop observing.
        """
        for module in self._live_modules():
            for unit in units_of(module):
                driver_of(unit).on_event = None if writer is None else self._decide_early
        arrays.before_write = None if writer is None else writer.count_change

    def _check_unchanged(self, timeout_s: float) -> None:
        """Void the newest copy if its source has changed since the copy began."""
        writer, self._writer = self._writer, None
        if writer is None or self._copying is None:
            return
        self._listen(None)
        changed = writer.changed()
        self._copying.decide(is_void=bool(changed))
        if changed:
            self._copying.wait_until_stamped(timeout_s)  # else it might be stamped after this
            self._is_void, self._may_overlap = True, False
            self._worlds[-1].void_newest()
            warnings.warn(
                f"a step changed {changed} before optimizer.step, while it was being copied: from "
                "now on, this rank begins a step only when its copy is complete",
                RuntimeWarning,
                stacklevel=2,
            )

    def release_earlier(self) -> None:
        """Release earlier worlds' copies. Call this after this world's copies are complete."""
        for one in self._worlds[:-1]:
            one.close()
        del self._worlds[:-1]

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

    def close(self) -> None:
        """Stop copying, and remove the hooks from the optimizer and the modules. Idempotent."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        with contextlib.suppress(CollectiveError):  # it ends with its group
            # This depends on no other rank. A thread that calls torch while the interpreter exits
            # aborts the process.
            if self._copying is not None and self._copying.is_here:
                self._copying.wait_until_copied(self._worlds[-1].timeout_s)
            self.stop(_CLOSE_S)

    def drop(self) -> None:
        """Release all copies. Call this if no other rank is left, or after the last step."""
        self.close()
        for one in self._worlds:
            one.close()
        self._worlds.clear()


def _calls_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer's step calls the step hooks.

    A class that wraps another optimizer might not call them if it does not call
    `Optimizer.__init__`.
    """
    hooks = getattr(optimizer, "_optimizer_step_pre_hooks", None)
    return hooks is not None and getattr(type(optimizer).step, "hooked", False)


def _hooked_first(optimizer: torch.optim.Optimizer, hook: Callable[..., None]) -> RemovableHandle:
    """Register a step pre-hook that runs before the program's own pre-hooks.

    The order matters, because the program's pre-hooks can write to the state.
    """
    handle = optimizer.register_step_pre_hook(hook)
    hooks: Any = optimizer._optimizer_step_pre_hooks  # an OrderedDict, which torch does not say
    hooks.move_to_end(handle.id, last=False)
    return handle


def choice_of(rows: Mapping[int, Mapping[str, Any]]) -> Choice:
    """Choose the version of the state to restore, and the survivors that read its copies.

    Args:
        rows: the result of `CopiedState.offers` on each survivor, by rank.

    Raises:
        CopiesLostError: for every version, all copies of some shard are lost.
    """
    offers = {
        rank: [Offer(Version(step, epoch), owner) for epoch, step, owner in row["offers"]]
        for rank, row in rows.items()
    }
    sets = {int(epoch): found for row in rows.values() for epoch, found in row["sets"]}
    return choose(offers, sets)
