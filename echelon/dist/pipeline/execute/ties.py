"""Parameters that several stages share, such as an embedding that is the output layer, too.

Each stage has a copy. They begin with the first one's value and get the same gradient at the end of
each step: every stage's total, added in the order of the stages. So they stay equal.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from echelon.dist.group import ProcessGroup
from echelon.dist.pipeline.execute.parameters import Tied
from echelon.dist.pipeline.execute.stage import Stage

_FIRST_TAG = 1 << 23


class Ties:
    """All ties of a pipeline, as this rank sees them."""

    def __init__(
        self,
        ties: Sequence[Sequence[str]],
        stages: Sequence[Stage],
        rank_of_stage: Sequence[int],
        group: ProcessGroup,
    ) -> None:
        """Find this rank's copies.

        Args:
            ties: of each tie its copies, as `stage:parameter`.
            stages: this rank's.
            rank_of_stage: where all stages are.
            group: the pipeline's ranks.

        Raises:
            ValueError: a copy is not there, or one stage is named twice.
        """
        self._group = group
        self._ties = [
            _Tie(number, tie, stages, rank_of_stage, group) for number, tie in enumerate(ties)
        ]

    def begin(self) -> None:
        """Give every copy the first stage's value. Blocks until the other holders have come."""
        for tie in self._ties:
            tie.begin()

    def set_aside(self) -> None:
        """Keep earlier steps' gradients out of this step's sums."""
        for tie in self._ties:
            for tied in tie.mine.values():
                tied.set_aside()

    def sum_gradients(self) -> None:
        """Give every copy the sum of all copies' gradients. Blocks until the others have come."""
        for tie in self._ties:
            tie.sum_gradients()


class _Tie:
    """One parameter's copies."""

    def __init__(
        self,
        number: int,
        names: Sequence[str],
        stages: Sequence[Stage],
        rank_of_stage: Sequence[int],
        group: ProcessGroup,
    ) -> None:
        copies = sorted(_parse(name, len(rank_of_stage)) for name in names)
        self._stages = [stage for stage, _ in copies]
        if len(copies) < 2 or len(set(self._stages)) != len(copies):
            raise ValueError(f"ties: {list(names)} must name two stages or more, each once")
        local = {stage.index: stage for stage in stages}
        self.mine = {s: Tied(local[s], name) for s, name in copies if s in local}
        self._owner = {stage: rank_of_stage[stage] for stage in self._stages}
        self._group = group
        self._first_tag = _FIRST_TAG + number * len(rank_of_stage)

    def begin(self) -> None:
        if not self.mine:
            return
        first = self._stages[0]
        own = {stage: tied.value() for stage, tied in self.mine.items() if stage == first}
        values = self._exchange([first], own)
        for stage, tied in self.mine.items():
            if stage != first:
                tied.set_value(values[first])

    def sum_gradients(self) -> None:
        if not self.mine:
            return
        own = {stage: tied.gradient() for stage, tied in self.mine.items()}
        gradients = self._exchange(self._stages, own)
        total = gradients[self._stages[0]].clone()
        for stage in self._stages[1:]:
            total += gradients[stage]
        for tied in self.mine.values():
            tied.set_gradient(total)

    def _exchange(
        self, stages: Sequence[int], own: dict[int, torch.Tensor]
    ) -> dict[int, torch.Tensor]:
        """Send what is mine to every other holder; return what all `stages` sent, by stage."""
        me = self._group.rank
        others = sorted(set(self._owner.values()) - {me})
        sends = [
            self._group.send(tensor.contiguous(), to, self._first_tag + stage, async_op=True)
            for stage, tensor in own.items()
            for to in others
        ]
        there = dict(own)
        like = next(iter(self.mine.values()))
        for stage in stages:
            if self._owner[stage] != me:
                there[stage] = like.room()
                self._group.recv(there[stage], self._owner[stage], self._first_tag + stage)
        for work in sends:
            assert work is not None
            work.wait()
        return there


def _parse(name: str, num_stages: int) -> tuple[int, str]:
    stage, colon, parameter = name.partition(":")
    if not colon or not stage.isdecimal() or not parameter or int(stage) >= num_stages:
        raise ValueError(
            f"ties: {name!r} is no copy; one reads STAGE:PARAMETER, such as '0:token.weight', "
            f"with a stage from 0 to {num_stages - 1}"
        )
    return int(stage), parameter
