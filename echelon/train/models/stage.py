"""Split a transformer into pipeline stages whose weights are named as in the whole model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from echelon.train.models.config import ModelConfig
from echelon.train.models.transformer import Transformer, embed, run

_EMBEDDING = "token.weight"


class TransformerStage(nn.Module):
    """A pipeline stage, which holds consecutive blocks of a model.

    The first stage also holds the embeddings, and the last stage the final norm and the head.

    If the head is tied to the embedding, the last stage holds both the head and the embedding,
    under the names that they have in the whole model, so that an optimizer's state is always saved
    under `token.weight`.

    Args:
        model: the whole model, whose modules the stage uses.
        index: the index of the stage.
        num_stages: the number of stages.
        blocks: the indices of the model's blocks that the stage holds.

    Attributes:
        config: the config of the whole model.

    Example:
        >>> stage = make_stage(model, index=0, num_stages=2)
        >>> stage(tokens).shape, len(stage.blocks)  # the features that the next stage is given
        (torch.Size([2, 8, 16]), 1)
    """

    position: nn.Module | None
    rotary: nn.Module | None

    def __init__(self, model: Transformer, index: int, num_stages: int, blocks: range) -> None:
        super().__init__()
        self.config = model.config
        self.is_first, self.is_last = index == 0, index == num_stages - 1
        if self.is_first or (self.is_last and model.config.tied):
            self.token = model.token
        self.position = model.position if self.is_first else None
        self.rotary = model.rotary
        self.blocks = nn.ModuleDict({str(number): model.blocks[number] for number in blocks})
        if self.is_last:
            self.final_norm = model.final_norm
            self.head = model.head

    def forward(self, x: Tensor, documents: Tensor | None = None) -> Any:
        """Run the forward pass of this stage.

        Args:
            x: the tokens, int64 [B, T], at the first stage; at later stages, the previous stage's
                features, [B, T, C].
            documents: as in `Transformer.forward`; each stage passes them to the next stage.

        Returns:
            The logits [B, T, V] at the last stage. At other stages, the features [B, T, C] or, with
            documents, a tuple of the features and the documents.

        Raises:
            ValueError: a sequence is longer than the model's context, or the documents have the
                wrong shape.
        """
        x = self.hidden(x, documents)
        if self.is_last:
            return self.head(x)
        return x if documents is None else (x, documents)

    def hidden(self, x: Tensor, documents: Tensor | None = None) -> Tensor:
        """Return this stage's features [B, T, C]; at the last stage, the input to the head."""
        if self.is_first:
            x = embed(self.config, self.token, self.position, x, documents)  # type: ignore[arg-type]
        x = run(self.blocks.values(), x, self.rotary, documents)  # type: ignore[arg-type]
        return self.final_norm(x) if self.is_last else x

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Move or convert the weights, and preserve the ties between weights."""
        has_both = self.is_last and "token" in self._modules
        tied = has_both and self.head.weight is self.token.weight
        result: Any = super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if tied:
            self.head.weight = self.token.weight
        return result


def make_stage(model: Transformer, index: int, num_stages: int) -> TransformerStage:
    """Return one stage of a model, with blocks split across stages as evenly as possible.

    Pass the result of `stage_ties` to the pipeline as `ties`.

    Raises:
        ValueError: there are more stages than blocks, or `index` is out of range.

    Example:
        >>> stages = [make_stage(model, index, num_stages=2) for index in range(2)]
        >>> torch.equal(stages[1](stages[0](tokens)), model(tokens))
        True
    """
    layers = len(model.blocks)
    if not 1 <= num_stages <= layers:
        raise ValueError(
            f"{layers} blocks cannot form {num_stages} stages: each stage needs a block"
        )
    if not 0 <= index < num_stages:
        raise ValueError(f"stage {index} does not exist: there are {num_stages} stages")
    each, rest = divmod(layers, num_stages)
    start = index * each + min(index, rest)
    return TransformerStage(model, index, num_stages, range(start, start + each + (index < rest)))


def stage_ties(config: ModelConfig, num_stages: int) -> list[list[str]]:
    """Return the weights that stages share (the tied embedding), for `Pipeline(ties=...)`.

    Example:
        >>> stage_ties(gpt2("124m"), num_stages=4)
        [['0:token.weight', '3:token.weight']]
    """
    if not config.tied or num_stages < 2:
        return []
    return [[f"0:{_EMBEDDING}", f"{num_stages - 1}:{_EMBEDDING}"]]
