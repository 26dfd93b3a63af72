"""Train a sharded model; when a rank is lost, its shards are restored from copies.

[Note: joining a sharded model] Ranks that leave a step to let others join have copied its result
before they meet. The end of the step is therefore the newest state with copies of all shards. No
work is repeated, and the step is committed in the new world. A joining rank first receives the
state that is not sharded, and then restores its shards from the copies like any other rank. It
counts as a newcomer until all copies of the new world are complete. If another rank is lost before
then, the newcomer begins again. Its copies may nevertheless be needed, because other ranks may
already have released the copies of the old world. The newcomer therefore offers its copies like any
other rank. It receives the unsharded state again only if it does not have that state for the chosen
step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from echelon.dist.group import ProcessGroup
from echelon.dist.resilient.handover import check_alike, receive_state, send_state
from echelon.dist.resilient.joining import JOINS, Joins, places_of
from echelon.dist.resilient.sharded import ShardedState
from echelon.dist.resilient.training.copied import CopiedTraining
from echelon.dist.resilient.training.world import World
from echelon.recorder.continuation import Epoch

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

    def _portable(self) -> dict[str, Any]:
        return self._state.contents()

    def _note_entered(self) -> None:
        self._is_newcomer = False
        self._state.set_timeout(self._timeout_s)  # they were made while ranks may still join

    def _row(self, epoch: Epoch) -> dict[str, Any]:
        row = super()._row(epoch)
        return row | JOINS if self._is_newcomer else row

    def _places(self, rows: list[dict[str, Any]]) -> tuple[int, list[int]]:
        if self._choice is None:
            return places_of(rows)
        step = self._choice.version.step
        return places_of([{"joins": step not in row["steps"]} for row in rows])

    def _exchange(self, group: ProcessGroup, source: int, newcomers: Sequence[int]) -> None:
        if group.rank not in newcomers:
            self._state.restore_rest(None if self._choice is None else self._choice.version.step)
        self._hand_over_rest(group, source, newcomers)
        self._restore_parts(group)

    def _hand_over_rest(self, group: ProcessGroup, source: int, newcomers: Sequence[int]) -> None:
        """Send or receive all state except the shards; compare it unless it is to be replaced."""
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
