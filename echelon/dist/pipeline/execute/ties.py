"""Keep tied parameters, such as an embedding that is also the output layer, equal across stages.

Each stage that uses a tied parameter has a copy, and all copies start with the value in the first
of these stages. At the end of each step, every copy gets the same gradient, which is the sum of the
stages' gradients, added in the order of the stages. The copies therefore remain equal. If several
stages on one rank hold the same parameter object, autograd adds their gradients, and the object
counts as one copy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from echelon.dist.channel import Channel
from echelon.dist.group import ProcessGroup
from echelon.dist.pipeline.execute.messages.links import connect
from echelon.dist.pipeline.execute.parameters import Tied
from echelon.dist.pipeline.execute.stage import Stage


class Ties:
    """All tied parameters of a pipeline, with this rank's copies."""

    def __init__(
        self,
        ties: Sequence[Sequence[str]],
        stages: Sequence[Stage],
        rank_of_stage: Sequence[int],
    ) -> None:
        """Find this rank's copies of the tied parameters.

        Args:
            ties: the copies of each tied parameter, as `stage:parameter`.
            stages: this rank's stages.
            rank_of_stage: the group rank that holds each stage.

        Raises:
            ValueError: a copy does not exist, is the only copy of its parameter, or is in the same
                stage as another copy.
        """
        self._ties = [_Tie(tie, stages, rank_of_stage) for tie in ties]

    def __len__(self) -> int:
        """Return the number of tied parameters."""
        return len(self._ties)

    def begin(self, group: ProcessGroup, name: str, device: torch.device) -> None:
        """Connect the ranks that hold copies, and set all copies to the first stage's value.

        The method blocks until all other ranks with copies of this rank's tied parameters have
        called it.

        Args:
            group: the pipeline's ranks.
            name: the pipeline's name, the same on all its ranks.
            device: the stages' device.
        """
        held = [tie for tie in self._ties if tie.mine]
        peers = sorted({rank for tie in held for rank in tie.holders} - {group.rank})
        channels = {peer: group.channel(peer, f"{name}/ties") for peer in peers}
        connect(channels.values(), device)
        for tie in held:
            tie.begin(group.rank, channels)

    def trained(self) -> list[list[tuple[str, bool]]]:
        """Return a (name, requires_grad) pair for each local copy of each tied parameter."""
        return [
            [(f"{stage}:{tied.name}", tied.is_trained) for stage, tied in tie.mine.items()]
            for tie in self._ties
        ]

    def set_aside(self) -> None:
        """Set aside the gradients of earlier steps, to keep them out of this step's sums."""
        for tie in self._ties:
            for tied in tie.distinct():
                tied.set_aside()

    def sum_gradients(self) -> None:
        """Set every copy's gradient to the sum over all copies.

        The method blocks until all ranks that have a copy have called it.
        """
        for tie in self._ties:
            if any(tied.is_trained for tied in tie.mine.values()):
                tie.sum_gradients()


class _Tie:
    """The copies of one tied parameter."""

    def __init__(
        self, names: Sequence[str], stages: Sequence[Stage], rank_of_stage: Sequence[int]
    ) -> None:
        copies = sorted(_parse(name, len(rank_of_stage)) for name in names)
        self._stages = [stage for stage, _ in copies]
        if len(copies) < 2 or len(set(self._stages)) != len(copies):
            raise ValueError(
                f"ties: {list(names)} must name at least two stages, and each stage only once"
            )
        local = {stage.index: stage for stage in stages}
        self.mine = {s: Tied(local[s], name) for s, name in copies if s in local}
        self._owner = {stage: rank_of_stage[stage] for stage in self._stages}
        self.holders = sorted(set(self._owner.values()))
        self._rank = -1
        self._channels: Mapping[int, Channel] = {}

    def distinct(self) -> list[Tied]:
        """Return this rank's copies of the parameter, each listed once even if stages share it."""
        first: dict[int, Tied] = {}
        for tied in self.mine.values():
            first.setdefault(id(tied.holder()), tied)
        return list(first.values())

    def begin(self, rank: int, channels: Mapping[int, Channel]) -> None:
        self._rank = rank
        self._channels = channels
        first = self._stages[0]
        own = {stage: tied.value() for stage, tied in self.mine.items() if stage == first}
        values = self._exchange([first], own)
        for stage, tied in self.mine.items():
            if stage != first:
                tied.set_value(values[first])

    def sum_gradients(self) -> None:
        distinct = self.distinct()
        own = {
            stage: tied.gradient() if tied in distinct else tied.room().zero_()
            for stage, tied in self.mine.items()
        }
        gradients = self._exchange(self._stages, own)
        total = gradients[self._stages[0]].clone()
        for stage in self._stages[1:]:
            total += gradients[stage]
        for tied in distinct:
            tied.set_gradient(total)

    def _exchange(
        self, stages: Sequence[int], own: dict[int, torch.Tensor]
    ) -> dict[int, torch.Tensor]:
        """Exchange tensors with all other ranks that hold copies of the tied parameter.

        Args:
            stages: the stages whose tensors this rank needs.
            own: this rank's tensors to send, keyed by stage.

        Returns:
            All sent and received tensors, keyed by stage.
        """
        others = [self._channels[rank] for rank in self.holders if rank != self._rank]
        sends = [
            channel.send(tensor.contiguous(), async_op=True)
            for tensor in own.values()
            for channel in others
        ]
        all_of_them = dict(own)
        like = next(iter(self.mine.values()))
        for stage in stages:
            if self._owner[stage] != self._rank:
                all_of_them[stage] = like.room()
                self._channels[self._owner[stage]].recv(all_of_them[stage])
        for work in sends:
            assert work is not None
            work.wait()
        return all_of_them


def _parse(name: str, num_stages: int) -> tuple[int, str]:
    stage, colon, parameter = name.partition(":")
    if not colon or not stage.isdecimal() or not parameter or int(stage) >= num_stages:
        raise ValueError(
            f"ties: {name!r} does not name a copy of a parameter; use 'STAGE:PARAMETER', for "
            f"example '0:token.weight', with a stage from 0 to {num_stages - 1}"
        )
    return int(stage), parameter
