"""Save one checkpoint per step in a folder, and remove checkpoints that are no longer needed.

    keeper = Keeper("runs/gpt", keep=3, keep_every=1000, best="lowest")
    keeper.save(step, state, async_op=True, score=validation_loss)

[Note: what is removed when] Rank 0 removes old checkpoints after it commits a new checkpoint and,
if the program sets `make_room`, when the disk is full. The newest complete checkpoint is never
removed.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from echelon.dist.checkpoint.disk.claim import Claim
from echelon.dist.checkpoint.life import rules
from echelon.dist.checkpoint.life.rules import Best, Policy
from echelon.dist.checkpoint.ranks import pending
from echelon.dist.checkpoint.ranks.peers import Peers, agree, find, together
from echelon.dist.checkpoint.ranks.pending import PendingSave
from echelon.dist.checkpoint.remote.steps import steps_of
from echelon.dist.checkpoint.remote.store import place_of
from echelon.dist.checkpoint.saving import begin
from echelon.errors import CheckpointError

if TYPE_CHECKING:
    from typing_extensions import Self

_FULL = (errno.ENOSPC, errno.EDQUOT)


class _ClaimedError(CheckpointError):
    """Raised when another job is saving checkpoints in the same folder."""


@dataclass(frozen=True, kw_only=True)
class _Others:
    """The saves that are still in progress on any rank.

    Attributes:
        age_s: the age, in seconds, of the current save; None if that save has ended on all ranks.
        may_be_superseded: whether this keeper's next save is allowed to start without waiting for
            the current save.
    """

    age_s: float | None
    may_be_superseded: bool


class Keeper:
    """The checkpoints of one job, in a folder reserved for that job.

    Args:
        folder: the folder, or the address of a folder in an object store. Each checkpoint is saved
            in a subfolder `step_<n>`. In an object store, a second job that uses the folder is not
            detected.
        keep: the number of most recent complete checkpoints to keep.
        keep_every: an interval in steps. Checkpoints at multiples of this interval are also kept.
        best: whether the "lowest" or the "highest" score is the best. The checkpoint with the best
            score is also kept.
        make_room: whether to remove old checkpoints when the disk is full. The newest complete
            checkpoint and the best checkpoint are never removed.
        timeout_s: see `checkpoint.save`.
        patience_s: how long a background save can run, in seconds, before the next save supersedes
            it. Until then, further background saves are skipped, so that a slow disk does not stall
            training. After that, the next save starts without waiting, so that a single write that
            hangs does not stall training either. The superseded save is completed only if its write
            ends within `timeout_s` and before the program exits. Only one save at a time can be
            superseded: if the second write hangs as well, the next save waits. 0 means that every
            save waits for the previous save.

    Raises:
        ValueError: a setting is not valid.

    Example:
        >>> with Keeper("runs/gpt", keep=2) as keeper:
        ...     for step in (100, 200, 300):
        ...         _ = keeper.save(step, {"model": model, "step": step})
        >>> sorted(path.name for path in Path("runs/gpt").glob("step_*"))
        ['step_00000200', 'step_00000300']
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        keep: int = 3,
        keep_every: int | None = None,
        best: Best | None = None,
        make_room: bool = False,
        timeout_s: float | None = None,
        patience_s: float = 0.0,
    ) -> None:
        if keep < 1:
            raise ValueError(
                f"keep must be at least 1, because the newest checkpoint is always kept; got {keep}"
            )
        if keep_every is not None and keep_every < 1:
            raise ValueError(f"keep_every must be at least 1, got {keep_every}")
        if best not in (None, "lowest", "highest"):
            raise ValueError(f'best must be "lowest" or "highest", got {best!r}')
        if not patience_s >= 0:
            raise ValueError(f"patience_s must be at least 0, got {patience_s}")
        self.folder = place_of(folder)
        self.policy = Policy(keep=keep, keep_every=keep_every, best=best)
        self._steps = steps_of(self.folder)
        self._make_room = make_room
        self._timeout_s = timeout_s
        self._patience_s = patience_s
        self._claim: Claim | None = None
        self._in_background: int | None = None  # the step of the save that was begun last
        self._pending: PendingSave | None = None  # that save
        self._latest: int | None = None  # the step whose folder was made last
        self._superseded: int | None = None
        self._is_closed = False
        self._warned: set[str] = set()

    def save(
        self,
        step: int,
        state: Mapping[str, Any],
        *,
        async_op: bool = False,
        score: float | None = None,
    ) -> bool:
        """Save a state as `step`'s checkpoint, then remove old checkpoints. Collective.

        If a background save is still running and `patience_s` is 0, this method first waits for
        that save to end. If `patience_s` is not 0, this save can supersede the running save once
        that save is `patience_s` seconds old. Until then, a save without `async_op` waits, and a
        save with `async_op` is skipped. If the save is skipped or the storage fails, rank 0 issues
        a warning and all ranks return False.

        Args:
            step: the number of finished steps.
            state: the state to save; see `checkpoint.save`.
            async_op: whether to copy the state and write the copy in the background. A failure is
                reported by the next `save` or `wait`, or raised by `dist.shutdown`.
            score: the score of this checkpoint for `best`, such as the validation loss. Rank 0's
                score is used.

        Returns:
            True if the checkpoint is on disk or, with `async_op`, if the save was started. The
            result is the same on all ranks.

        Raises:
            TypeError, ValueError: the state cannot be saved, or `step` or `score` is not valid.
            CheckpointError: another job is saving checkpoints in this folder.
            CollectiveError: a rank was lost.
        """
        if type(step) is not int or step < 0:
            raise ValueError(f"step must be the number of finished steps (>= 0), got {step!r}")
        if score is not None:
            score = float(score)
        peers = find(to_write=True)
        self._is_closed = False
        if self._patience_s and self._is_skipped(step, peers, async_op=async_op):
            return False
        self._settle(peers)
        doing = f"{self._steps.path(step)}: not saved"
        while True:
            try:
                self._claim_folder(peers)
                self._latest = step
                together(peers, doing, lambda: self._note(step, score) if peers.rank == 0 else None)
                self._begin(step, state, peers, async_op=async_op)
                return True
            except _ClaimedError:
                raise
            except (CheckpointError, OSError) as error:
                if not self._made_room(peers, error, step):
                    self._report(peers, f"step {step} not saved: {error}")
                    return False

    def wait(self) -> bool:
        """Wait for any background save; return whether it succeeded. Collective.

        A superseded save (see `Keeper`) is ignored. If the save failed, rank 0 issues a warning.

        Returns:
            False if the save failed on any rank; True if it succeeded or no save was in progress.
        """
        peers = find(to_write=True)
        if self._patience_s:
            self._look_at_others(peers)
        return self._settle(peers)

    def close(self) -> None:
        """Release the folder, so that other jobs can save to it.

        Not collective. Calling this twice is safe.
        """
        self._is_closed = True
        claim, self._claim = self._claim, None
        if claim is not None:
            claim.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- a save ----

    def _begin(self, step: int, state: Mapping[str, Any], peers: Peers, *, async_op: bool) -> None:
        self._pending = begin(
            self._steps.path(step),
            state,
            peers,
            async_op=async_op,
            keep=1,
            timeout_s=self._timeout_s,
            then=lambda: self._rotate(step),
        )
        self._in_background = step if async_op else None

    def _is_skipped(self, step: int, peers: Peers, *, async_op: bool) -> bool:
        """Return whether to skip this save because another save is in progress. Collective.

        If the other save has been running for longer than `patience_s`, this save supersedes it.
        """
        if not async_op:
            pending.wait_until_old(self._patience_s)
        others = self._look_at_others(peers)
        if others.age_s is None:
            return False
        before = "the save before" if self._in_background is None else f"step {self._in_background}"
        state = f"{before} is still being written after {others.age_s:.1f} s"
        if others.age_s <= self._patience_s and async_op:
            self._report(peers, f"step {step} not saved: {state}")
            return True
        if others.age_s > self._patience_s and others.may_be_superseded:
            self._report(peers, f"{state}; step {step} is saved beside it")
            self._superseded, self._in_background = self._in_background, None
            self._report_superseded(peers, peers.all_gather(_said(pending.supersede())))
        return False

    def _look_at_others(self, peers: Peers) -> _Others:
        """Find out which saves are still in progress on any rank. Collective.

        Every rank must call this method at the same point in the program, including a rank that has
        replaced a lost rank. If a superseded save has failed, rank 0 issues a warning.
        """
        is_foreign = pending.has_current() and not pending.is_current(self._pending)
        own = [pending.writing_s(), is_foreign, pending.has_superseded()]
        rows = peers.all_gather([*own, _said(pending.superseded_error())])
        self._report_superseded(peers, [said for *_, said in rows])
        has_superseded = any(row[2] for row in rows)
        if not has_superseded:
            self._superseded = None
        return _Others(
            age_s=max((row[0] for row in rows if row[0] is not None), default=None),
            may_be_superseded=not has_superseded and not any(row[1] for row in rows),
        )

    def _report_superseded(self, peers: Peers, told: Sequence[str | None]) -> None:
        """Issue a warning on rank 0 if a superseded save failed on any rank."""
        failed = [f"rank {rank} failed: {said}" for rank, said in enumerate(told) if said]
        if not failed:
            return
        step = (
            "a save that was superseded" if self._superseded is None else f"step {self._superseded}"
        )
        self._report(peers, f"{step} not saved: {failed[0]}")

    def _claim_folder(self, peers: Peers) -> None:
        def claim() -> str:
            if peers.rank == 0 and self._claim is None and isinstance(self.folder, Path):
                try:
                    self._claim = Claim(self.folder)
                except CheckpointError as error:
                    return str(error)
            return ""

        refused = peers.all_gather(together(peers, f"{self.folder}: not saved", claim))[0]
        if refused:
            raise _ClaimedError(refused, path=str(self.folder))

    def _note(self, step: int, score: float | None) -> None:
        """Store the step's score, and warn if a later step has already been saved."""
        last = rules.newest(self._steps.look())
        if last is not None and last.step > step:
            self._warn_once(
                f"{self.folder}: step {step} is saved beside step {last.step}, which stays the "
                "newest. If this run was rewound on purpose, move the later ones away"
            )
        self._steps.note_score(step, score if score is None or not math.isnan(score) else None)

    def _rotate(self, step: int) -> None:
        """Remove the checkpoints that the policy does not keep. Runs on rank 0 after a commit."""
        if step != self._latest or self._is_closed:
            return  # a write that was superseded, or left behind; the folder may have another owner
        self._steps.sweep()
        for gone in rules.superfluous(self._steps.look(), self.policy, step):
            if not self._is_being_written(gone):
                self._remove(gone)

    def _is_being_written(self, step: int) -> bool:
        return step == self._latest or (step == self._superseded and pending.has_superseded())

    def _remove(self, step: int) -> bool:
        reason = self._steps.remove(step)
        if reason is not None:
            self._warn_once(f"{self._steps.path(step)} was not removed: {reason}")
        return reason is None

    # ---- what fails ----

    def _settle(self, peers: Peers) -> bool:
        """Wait for any background save; return whether it succeeded on all ranks. Collective."""
        step, self._in_background = self._in_background, None
        try:
            agree(peers, pending.finish(), f"{self.folder}: the save before")
        except (CheckpointError, OSError) as error:
            self._made_room(peers, error, step)
            self._report(peers, f"step {step} not saved: {error}")
            return False
        return True

    def _made_room(self, peers: Peers, error: Exception, failed: int | None) -> bool:
        """Remove one checkpoint if the disk is full and `make_room` is set. Collective.

        Returns:
            Whether a checkpoint was removed.
        """
        is_full = any(peers.all_gather(isinstance(error, OSError) and error.errno in _FULL))
        if not (is_full and self._make_room):
            return False
        made = False
        if peers.rank == 0:
            with contextlib.suppress(OSError):
                made = self._give_up_one(failed)
        return any(peers.all_gather(made))

    def _give_up_one(self, failed: int | None) -> bool:
        """Remove a checkpoint to free disk space; return whether this succeeded.

        The checkpoint of step `failed` is not removed.
        """
        for step in rules.for_room(self._steps.look(), self.policy):
            if step != failed and not self._is_being_written(step) and self._remove(step):
                place = self._steps.path(step)
                warnings.warn(
                    f"{place}: removed because the disk is full", RuntimeWarning, stacklevel=2
                )
                return True
        return False

    def _report(self, peers: Peers, text: str) -> None:
        if peers.rank != 0:
            return
        last = None
        with contextlib.suppress(OSError):
            last = rules.newest(self._steps.look())
        known = f"step {last.step}" if last is not None else "none"
        warnings.warn(
            f"{self.folder}: {text}. Training continues; newest complete checkpoint: {known}",
            RuntimeWarning,
            stacklevel=2,
        )

    def _warn_once(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            warnings.warn(text, RuntimeWarning, stacklevel=2)


def _said(error: Exception | None) -> str | None:
    return None if error is None else f"{type(error).__name__}: {error}"
