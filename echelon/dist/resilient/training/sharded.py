"""Train a sharded model, and restore a lost rank's shards from copies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from echelon.dist.group import ProcessGroup
from echelon.dist.resilient.joining import Joins
from echelon.dist.resilient.sharded import ShardedState
from echelon.dist.resilient.training.copied import CopiedTraining
from echelon.dist.resilient.training.world import World

_T = TypeVar("_T")


class ShardedTraining(CopiedTraining[_T]):
    """One call to `run` on this rank with a sharded model."""

    _state: ShardedState

    def __init__(
        self,
        prepare: Callable[[World], Callable[[int], _T]],
        state: ShardedState,
        first: int,
        total: int,
        on_commit: Callable[[int, _T], None] | None,
        joins: Joins,
        from_checkpoint: Callable[[], int] | None,
        *,
        is_protected: bool,
    ) -> None:
        super().__init__(
            prepare, state, first, total, on_commit, joins,
            has_checkpoint=from_checkpoint is not None, is_protected=is_protected,
        )  # fmt: skip
        self._from_checkpoint = from_checkpoint

    def _call_from_checkpoint(self) -> int:
        assert self._from_checkpoint is not None
        return self._from_checkpoint()

    def _note_entered(self) -> None:
        super()._note_entered()
        self._state.set_timeout(self._timeout_s)  # they were made while ranks may still join

    def _exchange(self, group: ProcessGroup, source: int, newcomers: Sequence[int]) -> None:
        if group.rank not in newcomers:
            self._state.restore_rest(None if self._choice is None else self._choice.version.step)
        self._hand_over_rest(group, source, newcomers)
        self._restore_parts(group)
        self._is_newcomer = False
