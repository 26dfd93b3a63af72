"""Map echelon's tensors to the tensors of `transformers`, whose names and layout differ.

Llama's tensors are the same as echelon's, except for their names. GPT-2 stores its linear layers
transposed, and stores queries, keys and values as one tensor: c_attn = cat([query.T, key.T,
value.T], dim=-1).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from echelon.train.models.config import ModelConfig
from echelon.train.models.hugging_face.config_file import family_of
from echelon.train.models.transformer import Transformer

TOKEN, HEAD = "token.weight", "head.weight"
PREFIX = "transformer."  # of GPT-2's names; published files lack it
_LLAMA = {
    "token": "model.embed_tokens",
    "final_norm": "model.norm",
    "head": "lm_head",
    "attention_norm": "input_layernorm",
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.out": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}
_GPT2 = {
    "token": "transformer.wte",
    "position": "transformer.wpe",
    "final_norm": "transformer.ln_f",
    "head": "lm_head",
    "attention_norm": "ln_1",
    "attention.query": "attn.c_attn",
    "attention.key": "attn.c_attn",
    "attention.value": "attn.c_attn",
    "attention.out": "attn.c_proj",
    "mlp_norm": "ln_2",
    "mlp.up": "mlp.c_fc",
    "mlp.down": "mlp.c_proj",
}
# Contents of older files besides weights: causal masks, and rotary frequencies.
_DERIVED = re.compile(r"(h\.\d+\.attn\.(bias|masked_bias)|\.rotary_emb\.inv_freq)$")


@dataclass(frozen=True)
class Part:
    """One of echelon's tensors, and its position within a tensor of `transformers`.

    Attributes:
        ours: the tensor's name in echelon.
        shape: the tensor's shape in echelon.
        transposed: whether the tensor is stored transposed.
        start: the position along the stored tensor's last dim at which this tensor begins.
    """

    ours: str
    shape: tuple[int, ...]
    transposed: bool
    start: int

    @property
    def length(self) -> int:
        """The length of this tensor along the stored tensor's last dim."""
        return self.shape[0] if self.transposed else self.shape[-1]


@dataclass(frozen=True)
class Whole:
    """A tensor as `transformers` stores it, with the echelon tensors from which it is built."""

    name: str
    parts: tuple[Part, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the tensor."""
        first, length = self.parts[0], sum(part.length for part in self.parts)
        rows = first.shape[1:] if first.transposed else first.shape[:-1]
        return (*rows, length)


def wholes(config: ModelConfig) -> list[Whole]:
    """Return a model's tensors as `transformers` stores them, omitting a tied head.

    Raises:
        ValueError: `transformers` has no such model.
    """
    is_gpt2 = family_of(config) == "gpt2"
    found: dict[str, list[Part]] = {}
    for ours, shape in _shapes(config).items():
        theirs = _their_name(ours, _GPT2 if is_gpt2 else _LLAMA)
        parts = found.setdefault(theirs, [])
        is_matrix = len(shape) == 2 and ours.startswith("blocks.")
        parts.append(Part(ours, shape, is_gpt2 and is_matrix, sum(part.length for part in parts)))
    return [Whole(name, tuple(parts)) for name, parts in found.items()]


def is_derived(name: str) -> bool:
    """Return whether a stored tensor is computed from the config rather than trained."""
    return _DERIVED.search(name) is not None


def lacks_prefix(names: Iterable[str]) -> bool:
    """Return whether tensor names lack the `transformer.` prefix, as in published GPT-2 files."""
    return "wte.weight" in names


def _shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        model = Transformer(config)
    shapes = {name: tuple(one.shape) for name, one in model.named_parameters()}
    assert (HEAD in shapes) != config.tied, shapes
    return shapes


def _their_name(ours: str, names: dict[str, str]) -> str:
    module, _, kind = ours.rpartition(".")
    if not module.startswith("blocks."):
        return f"{names[module]}.{kind}"
    _, number, layer = module.split(".", 2)
    above = "transformer.h" if names is _GPT2 else "model.layers"
    return f"{above}.{number}.{names[layer]}.{kind}"
