"""Compute the number of weights and the FLOPs of a decoder-only transformer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

_GPT2 = {"vocabulary": 50_257, "context": 1024, "is_gated": False, "is_tied": True}
_LLAMA3 = {"vocabulary": 128_256, "context": 8192, "is_gated": True, "learns_positions": False}
_PRESETS: dict[str, dict[str, Any]] = {
    "gpt2": {**_GPT2, "layers": 12, "width": 768, "heads": 12},
    "gpt2-medium": {**_GPT2, "layers": 24, "width": 1024, "heads": 16},
    "gpt2-large": {**_GPT2, "layers": 36, "width": 1280, "heads": 20},
    "gpt2-xl": {**_GPT2, "layers": 48, "width": 1600, "heads": 25},
    "llama-1b": {
        **_LLAMA3, "layers": 16, "width": 2048, "heads": 32, "kv_heads": 8, "hidden": 8192,
        "is_tied": True,
    },
    "llama-8b": {
        **_LLAMA3, "layers": 32, "width": 4096, "heads": 32, "kv_heads": 8, "hidden": 14_336,
    },
    "llama-70b": {
        **_LLAMA3, "layers": 80, "width": 8192, "heads": 64, "kv_heads": 8, "hidden": 28_672,
    },
}  # fmt: skip
PRESETS = tuple(_PRESETS)
# From Hugging Face's config.json: GPT-2's names and those of Llama-shaped models.
_CONFIG_NAMES = {
    "layers": ("num_hidden_layers", "n_layer"),
    "width": ("hidden_size", "n_embd"),
    "heads": ("num_attention_heads", "n_head"),
    "kv_heads": ("num_key_value_heads",),
    "head_width": ("head_dim",),
    "hidden": ("intermediate_size", "n_inner"),
    "vocabulary": ("vocab_size",),
    "context": ("max_position_embeddings", "n_positions"),
}


@dataclass(frozen=True, kw_only=True)
class Model:
    """The dimensions of a decoder-only transformer.

    Attributes:
        layers, width, heads, vocabulary, context: as in `echelon.train.models.ModelConfig`.
        kv_heads, head_width, hidden: as in `echelon.train.models.ModelConfig`. 0 means the default,
            which is heads, width / heads, and 4 x width (8/3 x width if gated), respectively.
        is_gated: whether blocks have a gated feed-forward network (SwiGLU) and RMSNorm, as in
            Llama.
        is_tied: whether the output head shares its weight with the token embedding.
        learns_positions: whether the model has a learned position embedding.
    """

    layers: int
    width: int
    heads: int
    vocabulary: int = 50_257
    context: int = 1024
    kv_heads: int = 0
    head_width: int = 0
    hidden: int = 0
    is_gated: bool = False
    is_tied: bool = False
    learns_positions: bool = True

    def __post_init__(self) -> None:
        """Replace zeros with default values, and check the sizes.

        Raises:
            ValueError: the sizes are invalid.
        """
        for field in fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, bool):
                least = 0 if field.name in ("kv_heads", "head_width", "hidden") else 1
                if not isinstance(value, int) or value < least:
                    raise ValueError(f"{field.name} must be an integer >= {least}, got {value!r}")
        if not self.head_width and self.width % self.heads:
            raise ValueError(
                f"width {self.width} cannot be divided evenly among {self.heads} heads"
            )
        usual = -(-8 * self.width // 192) * 64 if self.is_gated else 4 * self.width
        object.__setattr__(self, "kv_heads", self.kv_heads or self.heads)
        object.__setattr__(self, "head_width", self.head_width or self.width // self.heads)
        object.__setattr__(self, "hidden", self.hidden or usual)
        if self.heads % self.kv_heads:
            raise ValueError(
                f"heads must be a multiple of kv_heads ({self.kv_heads}), got {self.heads}"
            )

    @property
    def query_width(self) -> int:
        """The total number of features across all query heads."""
        return self.heads * self.head_width

    @property
    def key_width(self) -> int:
        """The total number of features across all key heads; the value heads have as many."""
        return self.kv_heads * self.head_width

    @property
    def block_matrices(self) -> int:
        """The number of weights in a block's matrices, excluding biases and norms."""
        attention = 2 * self.width * (self.query_width + self.key_width)
        return attention + (3 if self.is_gated else 2) * self.width * self.hidden

    @property
    def block_parameters(self) -> int:
        """The number of weights in one block."""
        return self.block_matrices + 2 * self.width

    @property
    def first_parameters(self) -> int:
        """The number of weights in the embeddings, which precede the blocks."""
        positions = self.context * self.width if self.learns_positions else 0
        return self.vocabulary * self.width + positions

    @property
    def last_parameters(self) -> int:
        """The number of weights after the blocks: the final norm and, unless tied, the head."""
        return self.width + (0 if self.is_tied else self.vocabulary * self.width)

    @property
    def num_parameters(self) -> int:
        """The number of weights in the model, counting tied weights once."""
        return self.layers * self.block_parameters + self.first_parameters + self.last_parameters

    def block_flops(self, context: int) -> float:
        """Return the FLOPs per token in a block's forward pass, given the sequence length."""
        return 2.0 * self.block_matrices + 4.0 * self.query_width * context

    def head_flops(self) -> float:
        """Return the FLOPs per token in the head's forward pass."""
        return 2.0 * self.vocabulary * self.width

    def train_flops(self, context: int) -> float:
        """Return the FLOPs per token in training, given the sequence length.

        The formula is 6 N + 12 L H Q T (PaLM, appendix B), where N is the number of weights in
        matrices, L of layers, H of heads, Q of features per head, and T of tokens in a sequence.
        """
        return 3.0 * (self.layers * self.block_flops(context) + self.head_flops())


def read_model(text: str) -> Model:
    """Read a model from a preset's name, from `layers=12,width=768,...`, or from a config.json.

    Raises:
        ValueError: the text has none of these forms, or the sizes are invalid.
        OSError: the file cannot be read.
    """
    if text in _PRESETS:
        return Model(**_PRESETS[text])
    if "=" in text and not Path(text).exists():
        return _from_pairs(text)
    path = Path(text)
    if path.is_dir():
        path = path / "config.json"
    if not path.exists():
        raise ValueError(
            f"unknown model {text!r}; give one of the presets {', '.join(PRESETS)}, or sizes as "
            "layers=N,width=N,heads=N, or the path of a config.json"
        )
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as err:
        raise ValueError(f"{text} is not a model's config.json: {err}") from err
    return _from_config(config, text)


def _from_pairs(text: str) -> Model:
    kinds = {field.name: field.type for field in fields(Model)}
    sizes: dict[str, Any] = {}
    for pair in text.split(","):
        name, _, value = pair.partition("=")
        name = name.strip()
        if name not in kinds:
            raise ValueError(f"unknown model setting {name!r}; use one of {', '.join(kinds)}")
        if kinds[name] == "bool":
            sizes[name] = _as_bool(name, value)
        elif not value.strip().isdecimal():
            raise ValueError(f"{name} must be an integer >= 0, got {value!r}")
        else:
            sizes[name] = int(value)
    missing = [name for name in ("layers", "width", "heads") if name not in sizes]
    if missing:
        raise ValueError(f"missing model settings: {', '.join(missing)}")
    return Model(**sizes)


def _as_bool(name: str, value: str) -> bool:
    words = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
    if value.strip().lower() not in words:
        raise ValueError(f"{name} must be true or false, got {value!r}")
    return words[value.strip().lower()]


def _from_config(config: Any, text: str) -> Model:
    """Read the config.json that Hugging Face's `transformers` writes next to the weights."""
    if not isinstance(config, Mapping):
        raise ValueError(
            f"{text} is not a model's config.json: the file does not contain a JSON object"
        )
    sizes: dict[str, Any] = {}
    for name, keys in _CONFIG_NAMES.items():
        found = [config[key] for key in keys if config.get(key) is not None]
        if found:
            sizes[name] = found[0]
    missing = [name for name in ("layers", "width", "heads", "vocabulary") if name not in sizes]
    if missing:
        raise ValueError(
            f"{text} is not a model's config.json: it does not specify {', '.join(missing)}"
        )
    is_gpt2 = "n_embd" in config
    return Model(
        **sizes,
        is_gated=not is_gpt2,
        is_tied=bool(config.get("tie_word_embeddings", is_gpt2)),
        learns_positions=is_gpt2,
    )
