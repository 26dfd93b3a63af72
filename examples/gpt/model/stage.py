"""A pipeline stage of the example's own model; other models have their own stages."""

from __future__ import annotations

import torch.nn.functional as F  # noqa: N812 -- the name the field uses
from torch import Tensor, nn

from gpt.model.transformer import GPT
from gpt.text.data import share


class GPTStage(nn.Module):
    """Consecutive blocks, plus the embedding in the first stage and the head in the last.

    Parameters keep their names in the whole model, so that a checkpoint does not depend on the
    layout. The head's weights are the embedding's, so the first and the last stage both have them.
    """

    def __init__(self, model: GPT, index: int, num_stages: int) -> None:
        super().__init__()
        mine = share(len(model.blocks), index, num_stages)
        self.config = model.config
        self.is_first, self.is_last = index == 0, index == num_stages - 1
        if self.is_first or self.is_last:
            self.token = model.token
        self.blocks = nn.ModuleDict(
            {str(number): model.blocks[number] for number in range(mine.start, mine.stop)}
        )
        if self.is_last:
            self.final_norm = model.final_norm
        self.register_buffer("rotary", model.rotary, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Run this stage; the first takes int64 [B, T], the last returns logits [B, T, V]."""
        rotary = self.rotary[:, : x.shape[1]]
        if self.is_first:
            x = self.token(x)
        for block in self.blocks.values():
            x = block(x, rotary)
        return F.linear(self.final_norm(x), self.token.weight) if self.is_last else x
