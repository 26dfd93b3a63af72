"""Train a replicated model; when a rank is lost, the survivors repeat the step.

[Note: kept and finished] Each rank maintains two step numbers. `kept` is the step at whose start
the rank copied its state. `finished` is the first step that the rank has not finished. Each step
ends with a barrier. A rank increments `finished` before the barrier. After the barrier, the rank
copies its state and increments `kept`. The survivors' numbers therefore differ by at most one step.
The survivors continue from the lowest value of `finished`. Every survivor has the state for that
step, either live or as a copy.

The first call to `prepare` also counts as a step. A rank has finished this step when the call
returns.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Generic, TypeVar

from echelon.dist import runtime
from echelon.dist.group import ProcessGroup
from echelon.dist.resilient.copied import CopiedState
from echelon.dist.resilient.copies.choice import CopiesLostError, named
from echelon.dist.resilient.epochs import Epochs, Superseded
from echelon.dist.resilient.handover import check_alike, receive_state, send_state
from echelon.dist.resilient.joining import (
    ADMITTED_S,
    JOINS,
    JOINS_S,
    JoinDue,
    Joins,
    is_newcomer,
    places_of,
    wait_until_admitted,
)
from echelon.dist.resilient.kept import KeptState
from echelon.dist.resilient.parcel import Parcel
from echelon.dist.resilient.training.world import World
from echelon.errors import (
    CollectiveError,
    CollectiveMismatchError,
    PeerLostError,
    StoreError,
    StoreTimeoutError,
)
from echelon.host.identity import process_identity
from echelon.recorder import span, step
from echelon.recorder.continuation import Epoch, Standing, State, note_standing

_T = TypeVar("_T")
_LOST_S = 30.0  # for the launcher to publish who is left, once a rank is known to have died
_OTHER_S = 2.0  # the same after another error, which need not be anyone's death


class Training(Generic[_T]):
    """One call to `run` on this rank.

    Args:
        joins: the newest epoch in which other ranks join, as far as this rank knows.
    """

    def __init__(
        self,
        prepare: Callable[[World], Callable[[int], _T]],
        state: KeptState | CopiedState,
        first: int,
        total: int,
        on_commit: Callable[[int, _T], None] | None,
        joins: Joins,
        *,
        is_protected: bool,
    ) -> None:
        self._joins = joins
        self._prepare = prepare
        self._state = state
        self._first = first
        self._total = total
        self._on_commit = on_commit
        self._may_continue = is_protected
        self._has_begun = False
        self._is_inside = False  # of a step that it has begun and not finished
        self._kept = first - 1
        self._finished = first - 1
        self._result: _T | None = None
        self._standing = Standing(state=State.PROTECTED)
        self._timeout_s = runtime.world().timeout_s
        # A rank that is stuck while it joins is ended by the launcher, which publishes a newer
        # epoch. This must not fail before that, however short the timeout of the collectives is.
        self._limit_s = self._timeout_s + (JOINS_S if joins.is_on else 0.0)
        after = runtime.join_after()
        self._is_newcomer = after is not None  # until it has the state
        self._epochs = Epochs(runtime.job_store(), runtime.own_rank(), after or 0)

    def train(self, world: World) -> None:
        """Train up to the last step, in as many successive worlds as necessary.

        Args:
            world: the world of the ranks that started together. A rank that joins later ignores
                this argument.
        """
        now = self._be_admitted() if self._is_newcomer else world
        while True:
            try:
                self._train_in(now)
                break
            except CollectiveError as err:
                if not (self._may_continue and self._has_begun):
                    raise
                now = self._recover(err)
                self._is_inside = False
        self._state.drop()
        if self._may_continue:
            # How this rank came to its last world stays: the launcher may not have read it yet.
            note_standing(replace(self._standing, state=State.DONE))

    def close(self) -> None:
        """Release the resources that steps still hold. Also called after training has failed."""

    def _train_in(self, world: World) -> None:
        self._enter(world)
        compute = self._prepare(world)
        if world.epoch:  # random numbers that it drew, and whatever else it changed
            self._state.restore()
            if not self._is_kept(world):
                self._state.drop()
        if not self._has_begun:
            self._begin(world)
        while self._kept < self._total:
            step(self._kept)
            self._is_inside = True
            result = compute(self._kept)
            self._check_groups()
            self._finished, self._result, self._is_inside = self._kept + 1, result, False
            entered = self._end_step(world)
            self._commit(is_kept=self._is_kept(world))
            if entered and self._kept < self._total:
                self._complete_copies()
                note_standing(replace(self._standing, meets=entered))
                raise JoinDue(f"ranks are due to join in epoch {entered}", operation="join")

    def _end_step(self, world: World) -> int:
        """End a step on all ranks; return the next epoch (0 if none is due). Collective."""
        return self._joins.end_step(world.group, self._epochs.number)

    def _complete_copies(self) -> None:
        """Wait until all copies of this rank's state are complete."""

    def _stop_copying(self) -> None:
        """Wait until the thread that is copying the state of an abandoned step has stopped."""

    def _is_kept(self, world: World) -> bool:
        """Return whether a copy of the state is needed because other ranks exist or can join."""
        return world.group.size > 1 or self._joins.is_on

    def _be_admitted(self) -> World:
        """Wait until the other ranks admit this rank, and return the world that it joins."""
        self._has_begun = True
        note_standing(Standing(state=State.JOINING))
        return self._recover(JoinDue("this rank joins", operation="join"))

    def _enter(self, world: World) -> None:
        """Run the collectives that must precede `prepare` in a new world."""

    def _begin(self, world: World) -> None:
        self._finished = self._first
        self._has_begun = True
        if self._may_continue:
            self._note_begun()
            world.group.barrier()
        self._commit(is_kept=self._is_kept(world))
        if self._may_continue and self._joins.is_on:
            self._check_portable()

    def _check_portable(self) -> None:
        """Check, before the first step, that the state can be sent to a joining rank.

        Raises:
            ValueError: the state contains a value that cannot be sent.
        """
        try:
            Parcel.of(self._portable())
        except ValueError as err:
            raise ValueError(
                f"the state cannot be sent to a rank that replaces a lost one: {err}"
            ) from None

    def _portable(self) -> dict[str, Any]:
        """Return the state that a joining rank receives from another rank."""
        return self._kept_state().contents()

    @staticmethod
    def _check_groups() -> None:
        """Raise the error of a failed collective if the step ignored the error."""
        error = runtime.first_error()
        if error is not None:
            raise error

    def _commit(self, *, is_kept: bool) -> None:
        """Copy the live state if `is_kept` is True, and pass the step's result to `on_commit`."""
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
        """Wait for the next epoch after an error, and return the world of that epoch's ranks.

        Raises:
            CollectiveError: no epoch was published, this rank cannot continue in the published
                epoch, or some of the epoch's ranks did not arrive.
        """
        if isinstance(err, CollectiveMismatchError):
            raise err  # every rank would call the same again
        with span("recovery"):
            runtime.leave_groups()
            self._stop_copying()
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
                    wait_s = JOINS_S if self._joins.is_on else _LOST_S  # for a newer epoch
                except StoreTimeoutError as none:
                    raise _unrepeated(err, f"not all ranks of the epoch met: {none}") from err
                except StoreError as none:
                    raise _unrepeated(err, f"the job's store is out of reach: {none}") from err

    def _next_epoch(self, err: CollectiveError, wait_s: float) -> Epoch:
        try:
            newcomer = self._is_newcomer
            epoch = wait_until_admitted(self._epochs) if newcomer else self._epochs.next(wait_s)
        except StoreTimeoutError:
            raise _unrepeated(err, _why_none(err, wait_s)) from err
        except StoreError as none:
            why = f"the launcher has not published which ranks continue: {none}"
            raise _unrepeated(err, why) from err
        own = runtime.own_rank()
        if own in epoch.roster and epoch.life_of(own) != runtime.own_life():
            raise _unrepeated(err, f"another process has taken the place of rank {own}")
        self._joins.entered = epoch.number
        return epoch

    def _join(self, epoch: Epoch) -> World:
        """Agree on a step with an epoch's ranks, and restore the state at that step.

        Return the new world.
        """
        if not self._is_newcomer:  # the launcher then gives a rank that joins a limited time
            note_standing(replace(self._standing, meets=epoch.number))
        mine = {"process": process_identity()} | self._row(epoch)
        meets_s = ADMITTED_S if self._is_newcomer else self._limit_s
        rows = self._epochs.meet(epoch, mine, meets_s)
        places_of(rows)  # a rank that has the state is left
        target, repeats = self._agree(epoch, rows)
        source, newcomers = self._places(rows)
        facts = [row["process"] for row in rows]
        group = runtime.regroup(epoch.roster, epoch.number, facts, self._limit_s)
        self._hand_over(group, source, newcomers)
        group.timeout_s = self._timeout_s
        self._arrive(target, repeats=0 if epoch.joins or epoch.withdraws else repeats)
        return World(group, epoch.number, epoch.lost)

    def _hand_over(self, group: ProcessGroup, source: int, newcomers: Sequence[int]) -> None:
        """Send the state to the joining ranks or receive it, and then compare it on all ranks.

        Raises:
            ValueError: this rank cannot join, or the states of other ranks differ.
            PeerLostError: a rank was lost, or a connection broke.
        """
        if not newcomers:
            return
        try:
            self._exchange(group, source, newcomers)
        except CollectiveMismatchError:
            raise  # of the program, as when `from_checkpoint` is not collective on one rank
        except CollectiveError as err:
            runtime.leave_groups()  # its error would be found in the next world's steps
            raise PeerLostError(str(err), operation="join", ranks=err.ranks) from err

    def _exchange(self, group: ProcessGroup, source: int, newcomers: Sequence[int]) -> None:
        """Send or receive the state, as this rank's role requires, then compare it. Collective."""
        if group.rank == source:
            for place in newcomers:
                send_state(group, place, self._portable)
        elif group.rank in newcomers:
            self._kept_state().fill(receive_state(group, source))
            self._kept_state().restore()
            self._kept_state().keep()  # what `also` has made of it is compared
        check_alike(group, source, newcomers, self._kept_state().joined_parts())
        self._is_newcomer = False

    def _places(self, rows: list[dict[str, Any]]) -> tuple[int, list[int]]:
        """Return the rank that sends the state, and the ranks that receive it."""
        return places_of(rows)

    def _kept_state(self) -> KeptState:
        """Return `_state` as a `KeptState`. Use this only for replicated models."""
        assert isinstance(self._state, KeptState), self._state
        return self._state

    def _row(self, epoch: Epoch) -> dict[str, Any]:  # noqa: ARG002 -- of sharded models
        """Return the values that this rank sends to the other ranks of an epoch."""
        if self._is_newcomer:
            return JOINS
        return {"kept": self._kept, "finished": self._finished}

    def _agree(self, epoch: Epoch, rows: list[dict[str, Any]]) -> tuple[int, int]:  # noqa: ARG002 -- of sharded models
        """Roll back to a step that all ranks can restore.

        Returns:
            That step, and the number of steps to repeat.
        """
        held = [row for row in rows if not is_newcomer(row)]
        target = min(int(row["finished"]) for row in held)
        repeats = int(any(row["kept"] == target for row in held) and target < self._total)
        if self._is_newcomer:
            self._kept = self._finished = target
        else:
            self._settle(target)
        return target, repeats

    def _arrive(self, target: int, *, repeats: int) -> None:
        self._note(target, repeats=repeats)

    def _note_begun(self) -> None:
        """Report to the launcher, and record in the store, that this rank can begin the first step.

        The record in the store survives the loss of this rank's node.
        """
        if self._note(self._first):
            self._epochs.note_begun()

    def _note(self, first_step: int, *, repeats: int = 0) -> bool:
        """Report that this rank is ready to train in the current epoch.

        Returns:
            True if the report was written.
        """
        self._standing = Standing(
            state=State.PROTECTED,
            epoch=self._epochs.number,
            step=first_step,
            repeats=repeats,
            ready_mono_ns=time.monotonic_ns(),
        )
        return note_standing(self._standing)

    def _settle(self, target: int) -> None:
        """Set the live state and its stored copy to the state at the start of step `target`."""
        if self._kept == target:
            self._state.restore()
        elif self._finished == target == self._kept + 1:
            self._commit(is_kept=True)
        else:
            raise AssertionError((self._kept, self._finished, target))
        self._finished = target


def _unrepeated(err: CollectiveError, why: str) -> CollectiveError:
    is_join = isinstance(err, JoinDue)  # which no step has failed with
    kind = CollectiveError if is_join else type(err)
    return kind(
        f"{err}\n{'The ranks do not join' if is_join else 'The step is not repeated'}: {why}",
        group=err.group,
        operation=err.operation,
        sequence=err.sequence,
        ranks=err.ranks,
    )


def _why_not(epoch: Epoch) -> str:
    """Return the reason why this rank cannot continue in an epoch, or "" if it can."""
    if epoch.left:
        return f"{named(epoch.left)} left before its last step, with exit code 0"
    if epoch.done:
        has = "has" if len(epoch.done) == 1 else "have"
        return f"{named(epoch.done)} {has} finished all steps"
    if runtime.own_rank() not in epoch.roster:
        return (
            "the launcher counts this rank as lost, since its node could not be reached, and the "
            "other ranks continue without it"
        )
    return ""


def _why_none(err: CollectiveError, waited_s: float) -> str:
    """Return the likely reason why the launcher has not published an epoch."""
    if isinstance(err, JoinDue):
        return f"the launcher has not published a newer epoch within {waited_s:g} s"
    if not isinstance(err, PeerLostError):
        return f"no rank was lost within {waited_s:g} s of this error"
    is_gone, it = ("are gone", "them") if len(err.ranks) > 1 else ("is gone", "it")
    return (
        f"{named(err.ranks)} {is_gone}, but the launcher has not counted {it} as lost within "
        f"{waited_s:g} s. "
        "A rank that leaves by itself, with whatever exit code, is not lost: see why it left"
    )
