"""Train a model whose parts are on different ranks, and restore lost parts from copies.

[Note: copied models] The live state of a lost rank is gone, so the survivors continue from the
newest step for which copies of all parts exist. Before a step ends, each rank copies the state that
it had at the start of that step, partly on a background thread while the step computes. The
collective that ends the step returns the newest step whose copies are complete on all ranks: this
step or, if a copy is void, the previous one. A step is therefore committed at least one step later
than for a replicated model, and `CopiedState` stores the states of two steps.

[Note: joining a copied model] When ranks end a step to let other ranks join, they complete the
copies of the step's result before the rendezvous. The state at the end of the step is therefore the
newest state with copies of all parts. No work is repeated, and the step is committed in the new
world. A joining rank first receives all state except its parts, and then restores its parts from
the copies like any other rank. It counts as a newcomer until all copies of the new world are
complete. If another rank is lost before then, the newcomer joins again from the start. Its copies
might still be needed, because other ranks might already have released the copies of the old world.
The newcomer therefore offers its copies like any other rank. It receives the rest of the state
again only if it does not have that state for the chosen step.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from echelon.dist import runtime
from echelon.dist.group import ProcessGroup
from echelon.dist.resilient.copied import CopiedState, choice_of
from echelon.dist.resilient.copies.choice import Choice, CopiesLostError
from echelon.dist.resilient.handover import check_alike, receive_state, send_state
from echelon.dist.resilient.joining import JOINS, Joins, places_of
from echelon.dist.resilient.training.replicated import Training
from echelon.dist.resilient.training.world import World
from echelon.recorder.continuation import Epoch

_T = TypeVar("_T")


class CopiedTraining(Training[_T], ABC):
    """One call to `run` or `run_pipeline` for a copied model; see [Note: copied models]."""

    _state: CopiedState

    def __init__(
        self,
        prepare: Callable[[World], Callable[[int], _T]],
        state: CopiedState,
        first: int,
        total: int,
        on_commit: Callable[[int, _T], None] | None,
        joins: Joins,
        *,
        has_checkpoint: bool,
        is_protected: bool,
    ) -> None:
        super().__init__(prepare, state, first, total, on_commit, joins, is_protected=is_protected)
        self._has_checkpoint = has_checkpoint
        self._choice: Choice | None = None  # None: from the checkpoint
        self._lost_text = ""
        self._repeats = 0
        self._entered = 0  # the newest epoch whose state this rank has restored
        self._complete = first  # the newest step whose copies are known to be complete on all ranks
        self._results: dict[int, Any] = {}  # of the steps that are finished and not committed

    @abstractmethod
    def _call_from_checkpoint(self) -> int:
        """Call the program's `from_checkpoint`, and return its result. Collective."""

    def close(self) -> None:
        """Stop copying. Also called after training has failed."""
        self._state.close()

    def _enter(self, world: World) -> None:
        if not self._may_continue:
            return
        if not world.epoch:
            self._state.enter(world.group, world.epoch)
            return
        if self._entered != world.epoch:
            self._restore(world.group)
        self._note_entered()
        self._report(self._kept)
        self._note(self._kept, repeats=self._repeats)

    def _note_entered(self) -> None:
        """Record that this rank has the new world's state and that all copies are complete."""
        self._is_newcomer = False

    def _restore(self, group: ProcessGroup) -> None:
        """Restore the chosen state, or a checkpoint if no state was chosen. Collective.

        Also make the first copies of the restored state.
        """
        if self._choice is not None:
            self._state.restore_rest(self._choice.version.step)
        self._restore_parts(group)

    def _restore_parts(self, group: ProcessGroup) -> None:
        """Restore this rank's parts, and make their first copies in the new world. Collective."""
        if self._choice is not None:
            self._state.restore_from(self._choice, group)
        else:
            self._load(group)
        self._state.enter(group, self._epochs.number)
        self._state.keep(self._kept)
        self._complete = self._kept
        self._state.check_alike(group)  # a barrier, too: all copies are complete
        self._state.release_earlier()
        self._entered = self._epochs.number

    def _load(self, group: ProcessGroup) -> None:
        """Load the newest checkpoint after all copies of a shard have been lost. Collective."""
        self._state.restart(group)
        rows = group.all_gather_object((self._call_from_checkpoint(), self._kept))
        newest = max(kept for _, kept in rows)
        step = checkpoint_step([found for found, _ in rows], newest)
        if group.rank == 0:
            warnings.warn(
                f"{self._lost_text}: going back to the checkpoint of step {step}",
                RuntimeWarning,
                stacklevel=2,
            )
        self._results.clear()
        self._repeats = max(0, newest - step + 1)
        self._kept = self._finished = step

    def _begin(self, world: World) -> None:
        self._kept = self._finished = self._first
        if self._may_continue:
            self._state.keep(self._first)
            self._has_begun = True
            self._note_begun()
            self._state.check_alike(world.group)
            if self._joins.is_on:
                self._check_portable()
        self._has_begun = True

    def _end_step(self, world: World) -> int:
        if not self._is_copied(world):
            return super()._end_step(world)
        own, number = self._state.finish(), self._epochs.number
        entered, self._complete = self._joins.end_step_with(world.group, number, own)
        if self._complete < self._kept:
            self._state.discard_newest()
        return entered

    def _is_copied(self, world: World) -> bool:
        return self._may_continue and self._is_kept(world)

    def _complete_copies(self) -> None:
        self._state.finish()

    def _stop_copying(self) -> None:
        self._state.stop(self._limit_s)

    def _commit(self, *, is_kept: bool) -> None:
        """Commit the steps that a loss can no longer undo, and copy the state."""
        self._results[self._kept] = self._result
        self._result = None
        is_last = self._finished == self._total or not (self._may_continue and is_kept)
        self._report(self._finished if is_last else self._complete)
        self._kept = self._finished
        self._keep_or_drop(is_kept=is_kept and not is_last)
        if self._kept == self._first + 1 and not is_last:
            self._state.check_alike(runtime.world())  # what a step lets drift is seen here

    def _keep_or_drop(self, *, is_kept: bool) -> None:
        if self._may_continue and is_kept:
            self._state.keep(self._kept, overlaps=True)
        else:
            self._state.drop()

    def _report(self, stop: int) -> None:
        """Pass the results of all steps before `stop` to `on_commit`."""
        for number in sorted(one for one in self._results if one < stop):
            result = self._results.pop(number)
            if self._on_commit is not None:
                self._on_commit(number, result)

    # ---- after a loss ----

    def _row(self, epoch: Epoch) -> dict[str, Any]:
        begun = self._finished + self._is_inside
        row = {"begun": begun} | self._state.offers(epoch.roster)
        return row | JOINS if self._is_newcomer else row

    def _places(self, rows: list[dict[str, Any]]) -> tuple[int, list[int]]:
        if self._choice is None:
            return places_of(rows)
        step = self._choice.version.step
        return places_of([{"joins": step not in row["steps"]} for row in rows])

    def _agree(self, epoch: Epoch, rows: list[dict[str, Any]]) -> tuple[int, int]:
        try:
            self._choice = choice_of(dict(zip(epoch.roster, rows, strict=True)))
        except CopiesLostError as err:
            if not self._has_checkpoint:
                raise
            self._choice, self._lost_text = None, str(err)
            return self._kept, 1
        target = self._choice.version.step
        for number in [one for one in self._results if one >= target]:
            del self._results[number]
        self._kept = self._finished = target
        self._repeats = max(int(row["begun"]) for row in rows) - target
        return target, self._repeats

    def _arrive(self, target: int, *, repeats: int) -> None:
        """Do nothing, because `_enter` reports that this rank is ready."""

    # ---- when a rank joins ----

    def _portable(self) -> dict[str, Any]:
        return self._state.contents()

    def _hand_over_rest(self, group: ProcessGroup, source: int, newcomers: Sequence[int]) -> None:
        """Send or receive all state that is not restored from copies; compare it across ranks.

        The comparison is skipped if a checkpoint is about to replace the state.
        """
        if group.rank == source:
            for place in newcomers:
                send_state(group, place, self._contents)
        elif group.rank in newcomers:
            contents = receive_state(group, source)
            if contents["total"] != self._total:
                raise ValueError(
                    f"total must be equal on all ranks, but is {self._total} on this rank and "
                    f"{contents['total']} on the others"
                )
            self._first = contents["first"]
            self._state.fill(contents, self._kept)
        if self._choice is not None:
            check_alike(group, source, newcomers, self._state.joined_parts())

    def _contents(self) -> dict[str, Any]:
        return self._state.contents() | {"first": self._first, "total": self._total}


def checkpoint_step(found: Sequence[Any], newest: int) -> int:
    """Check that `from_checkpoint` returned the same valid step on all ranks; return this step.

    Args:
        found: the result of `from_checkpoint` on each rank.
        newest: the highest step that any rank has begun.

    Raises:
        ValueError: the results differ between ranks, or are not a valid step of this run.
    """
    if any(one != found[0] for one in found):
        raise ValueError(f"from_checkpoint returned a different step on some ranks: {list(found)}")
    step = found[0]
    if not isinstance(step, int) or isinstance(step, bool):
        kind = type(step).__qualname__
        raise ValueError(f"from_checkpoint must return a step number, not {kind}")
    if not 0 <= step <= newest + 1:
        raise ValueError(
            f"the checkpoint does not belong to this run: the checkpoint is at step {step}, but "
            f"the run is at step {newest}"
        )
    return step
