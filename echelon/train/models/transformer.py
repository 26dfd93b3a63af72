"""Define a decoder-only transformer that matches the published code of GPT-2 and Llama.

    token -> (+ position) -> blocks -> final_norm -> head

Checkpoints use the names of this model's parameters, regardless of how the model is distributed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from echelon.dist.parallel.plan import Plan
from echelon.train.models.block import Block
from echelon.train.models.config import ModelConfig
from echelon.train.models.layers import Embedding, Linear, make_norm
from echelon.train.models.rotary import RotaryTable


class Transformer(nn.Module):
    """A model that predicts the next token at every position.

    The model can be created on the meta device. `fully_shard` then allocates and initializes one
    unit at a time; `to_empty` followed by `reset_parameters` initializes the whole model at once.

    Attributes:
        config: the model's configuration.
        token: the embedding of tokens.
        position: the embedding of positions; None unless positions are learned.
        rotary: the table for rotary position embeddings, which is not saved in checkpoints; None
            unless positions are rotary.
        blocks: the transformer layers.
        final_norm: the norm before the head.
        head: the layer that maps features to logits; its weight is `token.weight` if the config
            ties the two.

    Example:
        >>> model = Transformer(llama("20m", layers=2, width=64, vocabulary=256))
        >>> tokens = torch.randint(256, (2, 8))
        >>> model(tokens).shape
        torch.Size([2, 8, 256])
    """

    position: Embedding | None
    rotary: RotaryTable | None

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.token = Embedding(config.vocabulary, config.width)
        learned = config.positions == "learned"
        self.position = Embedding(config.context, config.width) if learned else None
        self.rotary = None if learned else RotaryTable(config)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.final_norm = make_norm(config)
        self.head = _make_head(config, self.token)

    def forward(self, tokens: Tensor, documents: Tensor | None = None) -> Tensor:
        """Return the logits of the next token: [B, T, V].

        Args:
            tokens: the tokens: int64 [B, T], where T is at most the config's context.
            documents: the number of each token's document: int64 [B, T]. A token attends only to
                itself and to earlier tokens of its own document, and learned positions start at 0
                in each document. None means that each row is one document.

        Raises:
            ValueError: a sequence is longer than the model's context, or the documents have the
                wrong shape.
        """
        return self.head(self.hidden(tokens, documents))  # type: ignore[no-any-return]

    def hidden(self, tokens: Tensor, documents: Tensor | None = None) -> Tensor:
        """Return the input of the head, which is the output of the final norm: [B, T, C].

        Use this method with a loss that computes the logits in chunks. Under `fully_shard`, pass
        the method's name to `register_forward_method`. Arguments and errors are the same as for
        `forward`.
        """
        x = embed(self.config, self.token, self.position, tokens, documents)
        x = run(self.blocks, x, self.rotary, documents)
        return self.final_norm(x)  # type: ignore[no-any-return]

    def reset_parameters(self) -> None:
        """Initialize all weights again. Call this method before the model is sharded."""
        for module in self.modules():
            reset = getattr(module, "reset_parameters", None)
            if module is not self and callable(reset):
                reset()

    def plan(self) -> Plan:
        """Return the plan that distributes the model across ranks; see `echelon.dist.parallel`."""
        from echelon.train.models.plan import make_plan  # its stages are of this class

        return make_plan(self.config)

    def num_parameters(self) -> int:
        """Return the number of weights in the whole model; tied weights count once."""
        return self.config.num_parameters()

    def flops_per_token(self) -> int:
        """Return the cost of training on one token; see `ModelConfig.flops_per_token`."""
        return self.config.flops_per_token()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Move or convert the weights, and preserve the ties between weights."""
        tied = self.head.weight is self.token.weight
        result: Any = super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if tied:
            self.head.weight = self.token.weight
        return result


def embed(
    config: ModelConfig,
    token: nn.Embedding,
    position: nn.Embedding | None,
    tokens: Tensor,
    documents: Tensor | None,
) -> Tensor:
    """Return the input of the first block: [B, T, C].

    Raises:
        ValueError: a sequence is longer than the model's context, or the documents have the wrong
            shape.
    """
    num_tokens = tokens.shape[1]
    if num_tokens > config.context:
        raise ValueError(
            f"the input has {num_tokens} tokens, but the model's context is {config.context}"
        )
    if documents is not None and documents.shape != tokens.shape:
        raise ValueError(
            f"documents have shape {list(documents.shape)}, but tokens have {list(tokens.shape)}"
        )
    x: Tensor = token(tokens)
    if position is None:
        return x
    places = torch.arange(num_tokens, device=tokens.device)
    if documents is not None:
        places = places - _first_places(documents, places)
    return x + position(places)  # type: ignore[no-any-return]


def run(
    blocks: Iterable[nn.Module],
    x: Tensor,
    rotary: RotaryTable | None,
    documents: Tensor | None,
) -> Tensor:
    """Pass features through blocks: [B, T, C] -> [B, T, C]."""
    table = None if rotary is None else rotary()
    mask = None if documents is None else document_mask(documents)
    for block in blocks:
        x = block(x, table, mask)
    return x


def document_mask(documents: Tensor) -> Tensor:
    """Return the mask that restricts attention to single documents: bool [B, 1, T, T].

    A position can attend only to itself and to earlier positions of its own document.
    """
    same = documents[:, :, None] == documents[:, None, :]
    return same.tril()[:, None]


def _first_places(documents: Tensor, places: Tensor) -> Tensor:
    """Return the position in the row at which each token's document starts: int64 [B, T]."""
    starts = torch.ones_like(documents, dtype=torch.bool)
    starts[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return torch.where(starts, places, 0).cummax(dim=1).values


def _make_head(config: ModelConfig, token: nn.Embedding) -> Linear:
    if not config.tied:
        return Linear(config.width, config.vocabulary, bias=False)
    head = Linear(config.width, config.vocabulary, bias=False, device="meta")
    head.weight = token.weight
    return head
