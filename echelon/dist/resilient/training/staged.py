"""Train a pipeline; when a rank is lost, rebuild its stages and restore them from copies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from echelon.dist import runtime
from echelon.dist.group import ProcessGroup
from echelon.dist.resilient.joining import Joins
from echelon.dist.resilient.stages.setup import PipelineSetup
from echelon.dist.resilient.stages.state import StagesState
from echelon.dist.resilient.training.copied import CopiedTraining
from echelon.dist.resilient.training.world import World
from echelon.errors import CollectiveError
from echelon.recorder.continuation import Epoch

_T = TypeVar("_T")


class StagedTraining(CopiedTraining[_T]):
    """One call to `run_pipeline` on this rank.

    In each world, the program builds its objects before any state is restored, because a rank's
    stages depend on the number of ranks. The state is then restored by name.
    """

    _state: StagesState

    def __init__(
        self,
        build: Callable[[World], PipelineSetup[_T]],
        first: int,
        total: int,
        on_commit: Callable[[int, _T], None] | None,
        joins: Joins,
        from_checkpoint: Callable[[PipelineSetup[_T]], int] | None,
        *,
        is_protected: bool,
    ) -> None:
        super().__init__(
            lambda _: self.setup.train_step, StagesState(), first, total, on_commit, joins,
            has_checkpoint=from_checkpoint is not None, is_protected=is_protected,
        )  # fmt: skip
        self._build = build
        self._from_checkpoint = from_checkpoint

    @property
    def setup(self) -> PipelineSetup[_T]:
        """The program's training objects for the current world."""
        return self._state.setup

    def _call_from_checkpoint(self) -> int:
        assert self._from_checkpoint is not None
        return self._from_checkpoint(self.setup)

    def _exchange(self, group: ProcessGroup, source: int, newcomers: Sequence[int]) -> None:
        """Send or receive all state except that of the stages, which is restored later."""
        if self._choice is not None and group.rank not in newcomers:
            self._state.select(self._choice.version.step)
        self._hand_over_rest(group, source, newcomers)

    def _join(self, epoch: Epoch) -> World:
        world = super()._join(epoch)
        runtime.set_timeout(self._limit_s)  # a rank that joins may take longer to build its stages
        return world

    def _note_entered(self) -> None:
        super()._note_entered()
        runtime.set_timeout(self._timeout_s)

    def _enter(self, world: World) -> None:
        before = self._state.forget()
        setup = self._build(world)
        self._state.adopt(setup)
        if setup.pipe is before():
            raise ValueError(
                "build returned the pipeline of an earlier world, whose groups no longer work: "
                "create new groups, new stages, a new pipeline and a new optimizer in each call"
            )
        if self._may_continue:
            self._state.agree(world.group)
        super()._enter(world)

    def _recover(self, err: CollectiveError) -> World:
        world = super()._recover(err)
        _forget_frames(err)  # what keeps the error must not keep the stages that it passed
        return world


def _forget_frames(err: BaseException) -> None:
    """Clear the tracebacks of an error, its causes and its contexts, to release their frames."""
    seen: set[int] = set()
    left: list[BaseException | None] = [err]
    while left:
        one = left.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            one.__traceback__ = None
            left += [one.__context__, one.__cause__]
