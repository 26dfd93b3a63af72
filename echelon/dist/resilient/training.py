"""Run steps that all ranks commit together; when a rank is lost, the survivors repeat the step.

[Note: kept and finished] Each rank has two numbers. `kept` is a step: the rank copied its state at
the start of that step. `finished` equals `kept` until the rank has computed that step completely,
and is then one higher: the live state is now the start of the next step. A barrier ends each step.
A rank raises `finished` before the barrier, and `kept` only after it, when it copies the state
again. So a rank that has passed the barrier knows that all ranks have finished the step, and the
numbers of the survivors differ by at most one step. The survivors exchange `finished` and continue
from the lowest value, because each of them has that state, either live or as a copy.

The start counts as a step too: a rank has finished it once `prepare` has returned.

[Note: sharded models] There the live state of a lost rank is gone, so the survivors continue from
the newest step of which every shard was copied, `ShardedState` keeps two steps, and a step is
committed one step later: a rank that is past the barrier of a step knows that all copies of the
step's start are complete, since each rank completes its copy before that barrier.
"""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from echelon.dist import runtime
from echelon.dist.fsdp.parameters.flat import member_of
from echelon.dist.fsdp.parameters.unit import Unit, units_of
from echelon.dist.group import ProcessGroup
from echelon.dist.membership.environment import on_loss
from echelon.dist.resilient.copies.choice import Choice, CopiesLostError
from echelon.dist.resilient.epochs import Epochs, News, Superseded
from echelon.dist.resilient.kept import KeptState, Stateful
from echelon.dist.resilient.sharded import ShardedState, choice_of
from echelon.errors import (
    CollectiveError,
    CollectiveMismatchError,
    PeerLostError,
    StoreError,
    StoreTimeoutError,
)
from echelon.host.identity import process_identity
from echelon.recorder import span, step
from echelon.recorder.continuation import SHRINK, Epoch, Standing, State, note_standing

_T = TypeVar("_T")
_LOST_S = 30.0  # for the launcher to publish who is left, once a rank is known to have died
_is_claimed = False  # by a protected run of this process
_OTHER_S = 2.0  # the same after another error, which need not be anyone's death


@dataclass(frozen=True, slots=True)
class World:
    """The ranks that train together until the next loss.

    Attributes:
        group: the group of these ranks; `echelon.dist.world()` returns the same group.
        epoch: the number of the epoch: 0 at the start, higher after each loss.
        lost: the ranks that have been lost so far, as numbered by the launcher.

    Example:
        >>> def prepare(world):
        ...     print(f"epoch {world.epoch}, size {world.group.size}, lost: {list(world.lost)}")
        ...     return lambda step: None
        >>> run(prepare, model, optimizer, total=1)
        epoch 0, size 1, lost: []
    """

    group: ProcessGroup
    epoch: int
    lost: tuple[int, ...]


def run(
    prepare: Callable[[World], Callable[[int], _T]],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    total: int,
    first: int = 0,
    also: Sequence[Stateful] = (),
    on_commit: Callable[[int, _T], None] | None = None,
    from_checkpoint: Callable[[], int] | None = None,
) -> None:
    """Train the steps `first` to `total - 1`, and continue if ranks are lost.

    Under `echelon run --on-loss shrink`, the surviving ranks discard the step in which a rank died,
    restore the state from the start of that step, and repeat the step. Their processes are not
    restarted. With gradients that do not depend on the number of ranks
    (`echelon.train.same_bits.SameBits`), the result is bitwise identical to that of a run without
    losses. Under other launchers or settings, `run` warns and trains without this protection.

    Every rank must call this after `echelon.dist.init`. Each step ends with a barrier. Each rank
    copies the training state once per step, and the copy takes as much memory as that state.

    Args:
        prepare: creates whatever belongs to the current ranks (groups, meshes, `SameBits`), and
            returns a function that computes one step, given the step's number. `prepare` is called
            at the start, and again after each loss, once all earlier groups are closed. The
            function that it returns must change only the model, the optimizer, `also` and random
            numbers. It must not use gradients from an earlier step, and must not catch
            CollectiveError.
        model: the model. Every rank must have all of it, or `fully_shard` must have divided it
            among all ranks of the world. After a loss, a sharded model is divided among the ranks
            that are left; modules and parameters stay the same objects.
        optimizer: the optimizer of the model's parameters.
        total: the number of the last step, plus one.
        first: the number of the first step.
        also: schedules, averages and other objects whose state the steps change.
        on_commit: called once per step on each rank, with the step's number and result, when the
            step can no longer be undone by a loss; for a sharded model, one step later. It must not
            call collectives.
        from_checkpoint: for a sharded model, used if all copies of a shard are lost: loads the
            newest checkpoint into `model`, `optimizer` and `also`, and returns the number of the
            first step to train. Collective. Steps from there on are trained and committed again.

    Raises:
        ValueError: there is no world, `model` can be neither copied nor restored, or a protected
            `run` was already called in this process.
        CollectiveError: a collective failed, and the launcher did not publish a new epoch, because
            too few ranks are left or no rank has died.

    Example:
        >>> from echelon.train.same_bits import SameBits
        >>> def prepare(world):
        ...     probes = world.epoch == 0
        ...     same = SameBits(model, optimizer, micro_batches=2, seed=1, probe=probes)
        ...
        ...     def train_step(step):
        ...         loss = same.backward(step, lambda number: loss_fn(model(tokens), targets))
        ...         optimizer.step()
        ...         return loss
        ...
        ...     return train_step
        >>> run(prepare, model, optimizer, total=3, on_commit=lambda step, loss: print(step))
        0
        1
        2
    """
    group = runtime.world()
    _check_model(model, group)
    _check_optimizer(model, optimizer)
    if not first <= total:
        raise ValueError(f"first={first} is above total={total}")
    is_protected = on_loss() == SHRINK and group.size > 1
    if group.size > 1 and not is_protected and group.rank == 0:
        warnings.warn(
            "resilient.run gives no protection here: a rank that dies ends this job. Start the "
            "job with `echelon run --on-loss shrink`",
            stacklevel=2,
        )
    if is_protected:
        _claim()
    training: _Training[_T]
    if units_of(model):
        sharded = ShardedState(model, optimizer, also)
        training = _ShardedTraining(
            prepare, sharded, first, total, on_commit, from_checkpoint, is_protected=is_protected
        )
    else:
        kept = KeptState(model, optimizer, also)
        training = _Training(prepare, kept, first, total, on_commit, is_protected=is_protected)
    with contextlib.ExitStack() as stack:
        if is_protected:
            runtime.expect_epochs()
            stack.enter_context(News(runtime.job_store(), _end_world))
        training.train(World(group, 0, ()))


def _end_world(epoch: Epoch) -> None:
    """End the groups of all worlds older than an epoch, on a separate thread."""
    if epoch.left:
        return  # only ranks that miss the one which left have failed
    text = f"the launcher counts {_named(epoch.lost)} as lost"
    error = PeerLostError(text, operation="loss", sequence=epoch.number, ranks=epoch.lost)
    runtime.end_world(error, epoch.number)


class _Training(Generic[_T]):
    """One call to `run` on this rank."""

    def __init__(
        self,
        prepare: Callable[[World], Callable[[int], _T]],
        state: KeptState | ShardedState,
        first: int,
        total: int,
        on_commit: Callable[[int, _T], None] | None,
        *,
        is_protected: bool,
    ) -> None:
        self._prepare = prepare
        self._state = state
        self._first = first
        self._total = total
        self._on_commit = on_commit
        self._may_continue = is_protected
        self._has_begun = False
        self._kept = first - 1
        self._finished = first - 1
        self._result: _T | None = None
        self._standing = Standing(state=State.PROTECTED)
        self._epochs = Epochs(runtime.job_store(), runtime.own_rank())

    def train(self, world: World) -> None:
        """Train up to the last step, in as many successive worlds as necessary."""
        now = world
        while True:
            try:
                self._train_in(now)
                break
            except CollectiveError as err:
                if not (self._may_continue and self._has_begun):
                    raise
                now = self._recover(err)
        self._state.drop()
        if self._may_continue:
            # How this rank came to its last world stays: the launcher may not have read it yet.
            note_standing(replace(self._standing, state=State.DONE))

    def _train_in(self, world: World) -> None:
        self._enter(world)
        compute = self._prepare(world)
        if world.epoch:  # random numbers that it drew, and whatever else it changed
            self._state.restore()
            if world.group.size == 1:
                self._state.drop()
        if not self._has_begun:
            self._begin(world)
        while self._kept < self._total:
            step(self._kept)
            result = compute(self._kept)
            self._check_groups()
            self._finished, self._result = self._kept + 1, result
            world.group.barrier()
            self._commit(is_kept=world.group.size > 1)

    def _enter(self, world: World) -> None:
        """Prepare a new world for `prepare`. Collective."""

    def _begin(self, world: World) -> None:
        self._finished = self._first
        self._has_begun = True
        if self._may_continue:
            self._note(self._first)
            world.group.barrier()
        self._commit(is_kept=world.group.size > 1)

    @staticmethod
    def _check_groups() -> None:
        """Raise the error of a failed collective if the step ignored that error."""
        error = runtime.first_error()
        if error is not None:
            raise error

    def _commit(self, *, is_kept: bool) -> None:
        """Make the live state the one to restore after a loss; all ranks have or can reach it."""
        self._kept = self._finished
        self._keep_or_drop(is_kept=is_kept)
        if self._kept > self._first and self._on_commit is not None:
            result: Any = self._result
            self._on_commit(self._kept - 1, result)
        self._result = None

    def _keep_or_drop(self, *, is_kept: bool) -> None:
        if self._may_continue and is_kept:
            self._state.keep(self._kept)
        else:
            self._state.drop()

    # ---- after a loss ----

    def _recover(self, err: CollectiveError) -> World:
        """Return the world of the remaining ranks.

        Raises:
            CollectiveError: no epoch was published, or some ranks of the epoch did not join.
        """
        if isinstance(err, CollectiveMismatchError):
            raise err  # every rank would call the same again
        with span("recovery"):
            runtime.leave_groups()
            # Over a network, a death may be seen as any error, and the launcher learns of it later.
            is_fast = runtime.world().backend == "shm" and not isinstance(err, PeerLostError)
            wait_s = _OTHER_S if is_fast else _LOST_S
            while True:
                epoch = self._next_epoch(err, wait_s)
                why_not = _why_not(epoch)
                if why_not:
                    raise _unrepeated(err, why_not)
                try:
                    return self._join(epoch)
                except CopiesLostError as none:
                    raise _unrepeated(err, f"{none}, and there is no from_checkpoint=") from err
                except (Superseded, PeerLostError):
                    wait_s = _LOST_S  # for a newer epoch
                except StoreTimeoutError as none:
                    raise _unrepeated(err, f"not all ranks of the epoch met: {none}") from err
                except StoreError as none:
                    raise _unrepeated(err, f"the job's store is out of reach: {none}") from err

    def _next_epoch(self, err: CollectiveError, wait_s: float) -> Epoch:
        try:
            return self._epochs.next(wait_s)
        except StoreTimeoutError:
            raise _unrepeated(err, _why_none(err, wait_s)) from err
        except StoreError as none:
            why = f"the launcher has not published which ranks continue: {none}"
            raise _unrepeated(err, why) from err

    def _join(self, epoch: Epoch) -> World:
        """Agree on a step with an epoch's ranks, restore its start, and create a world."""
        mine = {"process": process_identity()} | self._row(epoch)
        timeout_s = runtime.world().timeout_s
        rows = self._epochs.meet(epoch, mine, timeout_s)
        target, repeats = self._agree(epoch, rows)
        facts = [row["process"] for row in rows]
        group = runtime.regroup(epoch.roster, epoch.number, facts)
        self._arrive(target, repeats=repeats)
        return World(group, epoch.number, epoch.lost)

    def _row(self, epoch: Epoch) -> dict[str, Any]:  # noqa: ARG002 -- of sharded models
        """Return what this rank brings to the meeting of an epoch."""
        return {"kept": self._kept, "finished": self._finished}

    def _agree(self, epoch: Epoch, rows: list[dict[str, Any]]) -> tuple[int, bool]:  # noqa: ARG002 -- of sharded models
        """Go back to the step where all continue; return its number, and whether it is repeated."""
        target = min(int(row["finished"]) for row in rows)
        repeats = any(row["kept"] == target for row in rows) and target < self._total
        self._settle(target)
        return target, repeats

    def _arrive(self, target: int, *, repeats: bool) -> None:
        self._note(target, repeats=repeats)

    def _note(self, first_step: int, *, repeats: int = 0) -> None:
        """Report that this rank is ready to train in the current epoch."""
        self._standing = Standing(
            state=State.PROTECTED,
            epoch=self._epochs.number,
            step=first_step,
            repeats=repeats,
            ready_mono_ns=time.monotonic_ns(),
        )
        note_standing(self._standing)

    def _settle(self, target: int) -> None:
        """Restore the live state and the kept copy to the start of a step."""
        if self._kept == target:
            self._state.restore()
        elif self._finished == target == self._kept + 1:
            self._commit(is_kept=True)
        else:
            raise AssertionError((self._kept, self._finished, target))
        self._finished = target


class _ShardedTraining(_Training[_T]):
    """One call of `run` on this rank with a sharded model; see [Note: sharded models]."""

    _state: ShardedState

    def __init__(
        self,
        prepare: Callable[[World], Callable[[int], _T]],
        state: ShardedState,
        first: int,
        total: int,
        on_commit: Callable[[int, _T], None] | None,
        from_checkpoint: Callable[[], int] | None,
        *,
        is_protected: bool,
    ) -> None:
        super().__init__(prepare, state, first, total, on_commit, is_protected=is_protected)
        self._from_checkpoint = from_checkpoint
        self._choice: Choice | None = None  # None: from the checkpoint
        self._lost_text = ""
        self._repeats = 0
        self._results: dict[int, Any] = {}  # of the steps that are finished and not committed

    def _enter(self, world: World) -> None:
        if not self._may_continue:
            return
        if not world.epoch:
            self._state.enter(world.group, world.epoch)
            return
        if self._choice is not None:
            self._state.restore_from(self._choice, world.group)
        else:
            self._load(world)
        self._state.enter(world.group, world.epoch)
        self._state.keep(self._kept)
        self._state.check_alike(world.group)  # a barrier, too: all copies are complete
        self._state.release_earlier()
        self._report(self._kept)
        self._note(self._kept, repeats=self._repeats)

    def _load(self, world: World) -> None:
        """Go back to the newest checkpoint, since all copies of a shard are lost."""
        assert self._from_checkpoint is not None
        self._state.restart(world.group)
        rows = world.group.all_gather_object((self._from_checkpoint(), self._kept))
        newest = max(kept for _, kept in rows)
        step = checkpoint_step([found for found, _ in rows], newest)
        if world.group.rank == 0:
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
            self._note(self._first)
            self._state.check_alike(world.group)
        self._has_begun = True

    def _commit(self, *, is_kept: bool) -> None:
        """Commit the step before the one that all have just finished, and copy the state."""
        self._results[self._kept] = self._result
        self._result = None
        is_last = self._finished == self._total or not (self._may_continue and is_kept)
        self._report(self._finished if is_last else self._kept)
        self._kept = self._finished
        self._keep_or_drop(is_kept=is_kept and not is_last)

    def _report(self, stop: int) -> None:
        """Report the steps before `stop`, which no loss can undo any more."""
        for number in sorted(one for one in self._results if one < stop):
            result = self._results.pop(number)
            if self._on_commit is not None:
                self._on_commit(number, result)

    # ---- after a loss ----

    def _row(self, epoch: Epoch) -> dict[str, Any]:
        return {"begun": self._finished} | self._state.offers(epoch.roster)

    def _agree(self, epoch: Epoch, rows: list[dict[str, Any]]) -> tuple[int, bool]:
        try:
            self._choice = choice_of(dict(zip(epoch.roster, rows, strict=True)))
        except CopiesLostError as err:
            if self._from_checkpoint is None:
                raise
            self._choice, self._lost_text = None, str(err)
            return self._kept, True
        target = self._choice.version.step
        for number in [one for one in self._results if one >= target]:
            del self._results[number]
        self._kept = self._finished = target
        return target, target < self._total

    def _arrive(self, target: int, *, repeats: bool) -> None:  # noqa: ARG002 -- see `_enter`
        self._repeats = repeats


def checkpoint_step(found: Sequence[Any], newest: int) -> int:
    """Return the step from which all ranks train again.

    Args:
        found: what `from_checkpoint` returned on each rank.
        newest: the highest step that any rank had begun; its checkpoint may have been saved at the
            end of that step, as the start of the next one.

    Raises:
        ValueError: the values differ, or cannot be a step of this run.
    """
    if any(one != found[0] for one in found):
        raise ValueError(f"from_checkpoint returned different steps on the ranks: {list(found)}")
    step = found[0]
    if not isinstance(step, int) or isinstance(step, bool):
        kind = type(step).__qualname__
        raise ValueError(f"from_checkpoint must return the number of a step, not {kind}")
    if not 0 <= step <= newest + 1:
        raise ValueError(
            f"the checkpoint is not of this run: it is at step {step}, the run at step {newest}"
        )
    return step


def _unrepeated(err: CollectiveError, why: str) -> CollectiveError:
    return type(err)(
        f"{err}\nThe step is not repeated: {why}",
        group=err.group,
        operation=err.operation,
        sequence=err.sequence,
        ranks=err.ranks,
    )


def _why_not(epoch: Epoch) -> str:
    """Return why this rank cannot continue in an epoch, or "" if it can."""
    if epoch.left:
        return f"{_named(epoch.left)} left before its last step, with exit code 0"
    if epoch.done:
        return f"{_named(epoch.done)} has finished all steps"
    if runtime.own_rank() not in epoch.roster:
        return (
            "the launcher counts this rank as lost, since its node could not be reached, and the "
            "other ranks continue without it"
        )
    return ""


def _named(ranks: Sequence[int]) -> str:
    return f"rank {', '.join(map(str, ranks))}"


def _why_none(err: CollectiveError, waited_s: float) -> str:
    """Return why the launcher has not published an epoch, as far as this rank knows."""
    if not isinstance(err, PeerLostError):
        return f"no rank was lost within {waited_s:g} s of this error"
    ranks = ", ".join(map(str, err.ranks))
    return (
        f"rank {ranks} is gone, but the launcher has not counted it as lost within {waited_s:g} s. "
        "A rank that leaves by itself, with whatever exit code, is not lost: see why it left"
    )


def _claim() -> None:
    """Refuse a second protected run, because it would read the first run's epochs and standings."""
    global _is_claimed
    if _is_claimed:
        raise ValueError(
            "resilient.run was already called in this process: with --on-loss shrink, a single "
            "call must train all steps"
        )
    _is_claimed = True


def _check_model(model: nn.Module, world: ProcessGroup) -> None:
    if any(isinstance(module, DistributedDataParallel) for module in model.modules()):
        raise ValueError(
            "resilient.run does not cover DistributedDataParallel, whose groups it cannot "
            "recreate: pass the wrapped module, and average gradients with SameBits"
        )
    if any(isinstance(one, DTensor) for one in model.parameters()):
        raise ValueError(
            "resilient.run does not cover DTensors: a rank's parts are lost with the rank. Use "
            "fully_shard, or restarts from a checkpoint"
        )
    for unit in units_of(model):
        _check_unit(unit, world)
    for name, buffer in model.named_buffers():
        places = zip(buffer.stride(), buffer.shape, strict=True)
        if any(stride == 0 and length > 1 for stride, length in places):
            raise ValueError(
                f"buffer {name!r} is expanded and cannot be restored: clone the buffer first"
            )


def _check_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Refuse shards of other modules, which would be neither copied nor divided again."""
    own = {member for unit in units_of(model) for member in unit.members}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            member = member_of(parameter)
            if member is not None and member not in own:
                raise ValueError(
                    "resilient.run cannot restore a sharded parameter that is in the optimizer, "
                    f"but not in the model: {member}"
                )


def _check_unit(unit: Unit, world: ProcessGroup) -> None:
    reason = ""
    if any(flat.group is not world for flat in unit.flats):
        reason = "is not sharded over the world"
    elif any(flat.replicas is not None for flat in unit.flats):
        reason = "is sharded with replicas (mesh= with two axes)"
    elif unit.near is not None:
        reason = "has a number as reshard_after_forward="
    elif unit.device.type != "cpu":
        reason = f"is on {unit.device}, where copies of shards have not been tried"
    if reason:
        raise ValueError(
            f"resilient.run cannot continue with this sharded model after a loss: {unit} {reason}"
        )
