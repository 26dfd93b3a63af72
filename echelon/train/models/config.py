"""Define the configuration of a decoder-only transformer as plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

_HIDDEN_MULTIPLE = 64  # widths for which kernels are fast


@dataclass(frozen=True, kw_only=True)
class RotaryScaling:
    """The scaling of rotary frequencies that lets a model use a longer context.

    Attributes:
        kind: "linear" divides all frequencies by `factor`; "llama3" divides low frequencies, leaves
            high frequencies unchanged, and interpolates smoothly in between.
        factor: the divisor.
        low_frequency_factor: for "llama3", the number of turns within `original_context` below
            which a frequency is divided.
        high_frequency_factor: for "llama3", the number of turns within `original_context` above
            which a frequency is left unchanged.
        original_context: for "llama3", the context length with which the model was originally
            trained.

    Example:
        >>> scaling = RotaryScaling(kind="llama3", factor=8.0)
        >>> config = llama("1b", rotary_scaling=scaling, context=16384)
    """

    kind: Literal["linear", "llama3"]
    factor: float
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    original_context: int = 8192

    def __post_init__(self) -> None:
        """Check that the values are valid.

        Raises:
            ValueError: the kind is unknown, or a factor is invalid.
        """
        _require_one_of("rotary_scaling.kind", self.kind, ("linear", "llama3"))
        if self.factor < 1 or self.original_context < 1:
            raise ValueError(
                "rotary_scaling: factor and original_context must be at least 1, got "
                f"{self.factor} and {self.original_context}"
            )
        if not 0 < self.low_frequency_factor < self.high_frequency_factor:
            raise ValueError(
                "rotary_scaling: low_frequency_factor must be above 0 and below "
                f"high_frequency_factor ({self.high_frequency_factor}), got "
                f"{self.low_frequency_factor}"
            )


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The dimensions and variants of a model; the defaults are those of Llama.

    Attributes:
        layers: the number of blocks.
        width: the number of features of the residual stream.
        heads: the number of query heads.
        context: the maximum number of tokens in a sequence.
        vocabulary: the number of tokens in the vocabulary.
        kv_heads: the number of key-value heads, a divisor of `heads`; 0 means `heads`.
        head_width: the number of features of a head; 0 means width / heads.
        hidden: the number of features inside the feed-forward network; 0 means 4 x width for
            "gelu", and 8/3 x width rounded up to a multiple of 64 for "swiglu".
        norm: "rms" (RMSNorm) or "layer" (LayerNorm).
        mlp: "swiglu" (layers gate, up and down) or "gelu" (layers up and down, with GELU's tanh
            approximation).
        positions: "rotary" or "learned".
        rotary_base: for rotary positions, the base of the frequencies.
        rotary_scaling: for rotary positions, the scaling of the frequencies; None means no scaling.
        tied: whether the output head shares its weight with the token embedding.
        bias: whether the blocks' linear layers and the layer norms have biases.
        qkv_bias: whether the layers for queries, keys and values have biases even if `bias` is
            False (Qwen2).
        eps: the epsilon of the norms.

    Example:
        >>> config = ModelConfig(layers=2, width=64, heads=4, context=128, vocabulary=256)
        >>> config.num_parameters()
        139584
    """

    layers: int
    width: int
    heads: int
    context: int
    vocabulary: int
    kv_heads: int = 0
    head_width: int = 0
    hidden: int = 0
    norm: Literal["rms", "layer"] = "rms"
    mlp: Literal["swiglu", "gelu"] = "swiglu"
    positions: Literal["rotary", "learned"] = "rotary"
    rotary_base: float = 10_000.0
    rotary_scaling: RotaryScaling | None = None
    tied: bool = False
    bias: bool = False
    qkv_bias: bool = False
    eps: float = 1e-5

    def __post_init__(self) -> None:
        """Replace zeros with default values, and reject invalid settings.

        Raises:
            ValueError: a size is too small, a choice is unknown, or two settings are incompatible.
            TypeError: a size is not an integer.
        """
        _require_one_of("norm", self.norm, ("rms", "layer"))
        _require_one_of("mlp", self.mlp, ("swiglu", "gelu"))
        _require_one_of("positions", self.positions, ("rotary", "learned"))
        for name in ("layers", "width", "heads", "context", "vocabulary"):
            _require_size(name, getattr(self, name), least=1)
        for name in ("kv_heads", "head_width", "hidden"):
            _require_size(name, getattr(self, name), least=0)
        self._fill_zeros()
        if self.heads % self.kv_heads:
            raise ValueError(
                f"heads must be a multiple of kv_heads ({self.kv_heads}), got {self.heads}"
            )
        if self.positions == "rotary" and self.head_width % 2:
            raise ValueError(f"rotary positions need an even head_width, got {self.head_width}")
        if self.positions == "learned" and self.rotary_scaling is not None:
            raise ValueError("rotary_scaling must be None if positions='learned'")
        if not (self.eps > 0 and self.rotary_base > 0):
            raise ValueError(
                f"eps and rotary_base must be positive, got {self.eps} and {self.rotary_base}"
            )

    def _fill_zeros(self) -> None:
        if self.head_width == 0 and self.width % self.heads:
            raise ValueError(
                f"width {self.width} cannot be divided evenly among {self.heads} heads; set "
                "head_width"
            )
        narrow = -(-8 * self.width // (3 * _HIDDEN_MULTIPLE)) * _HIDDEN_MULTIPLE
        object.__setattr__(self, "kv_heads", self.kv_heads or self.heads)
        object.__setattr__(self, "head_width", self.head_width or self.width // self.heads)
        usual = narrow if self.mlp == "swiglu" else 4 * self.width
        object.__setattr__(self, "hidden", self.hidden or usual)

    def num_parameters(self) -> int:
        """Return the number of weights in the whole model; tied weights count once."""
        embeddings = self.vocabulary * self.width * (1 if self.tied else 2)
        if self.positions == "learned":
            embeddings += self.context * self.width
        return embeddings + self.layers * self._block_parameters() + self._norm_parameters()

    def flops_per_token(self) -> int:
        """Return the cost of training on one token: 6 N + 12 L H D T floating-point operations.

        N is the number of weights used in multiplications, including the head but not the
        embeddings. Two operations per weight in the forward pass and four in the backward pass give
        6 N. The scores and the weighted sum of attention in L layers, with H heads of width D and a
        context of T tokens, account for 12 L H D T. This is the convention of the PaLM paper
        (appendix B), which does not subtract the masked half of attention.
        """
        looked_up = 0 if self.tied else self.vocabulary * self.width
        if self.positions == "learned":
            looked_up += self.context * self.width
        attention = 12 * self.layers * self.heads * self.head_width * self.context
        return 6 * (self.num_parameters() - looked_up) + attention

    def to_dict(self) -> dict[str, Any]:
        """Return the config as plain values, which `from_dict` and checkpoints accept."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ModelConfig:
        """Build a config from the output of `to_dict`.

        Raises:
            ValueError: a key is not a field, a size is missing, or a value is invalid.
            TypeError: a size is not an integer.
        """
        content = dict(values)
        _require_fields(cls, content)
        scaling = content.get("rotary_scaling")
        if isinstance(scaling, Mapping):
            _require_fields(RotaryScaling, scaling)
            content["rotary_scaling"] = RotaryScaling(**scaling)
        return cls(**content)

    def _block_parameters(self) -> int:
        queries, keys = self.heads * self.head_width, self.kv_heads * self.head_width
        attention = 2 * self.width * (queries + keys)
        num_matrices = 3 if self.mlp == "swiglu" else 2
        mlp = num_matrices * self.width * self.hidden
        biases = 0
        if self.bias:
            biases += self.width + (num_matrices - 1) * self.hidden + self.width
        if self.bias or self.qkv_bias:
            biases += queries + 2 * keys
        return attention + mlp + biases + 2 * self._norm_parameters()

    def _norm_parameters(self) -> int:
        return self.width * (2 if self.norm == "layer" and self.bias else 1)


def _require_one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ValueError(f"{name} must be one of {', '.join(known)}, got {value!r}")


def _require_size(name: str, value: int, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} must be an integer, got {value!r}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")


def _require_fields(kind: type[ModelConfig | RotaryScaling], values: Mapping[str, Any]) -> None:
    known = {field.name for field in fields(kind)}
    unknown = sorted(set(values) - known)
    if unknown:
        raise ValueError(
            f"unknown {kind.__name__} settings: {', '.join(unknown)}; known "
            f"settings: {', '.join(sorted(known))}"
        )
    needed = [one.name for one in fields(kind) if one.default is one.default_factory]  # MISSING
    missing = [name for name in needed if name not in values]
    if missing:
        raise ValueError(f"{kind.__name__} requires these settings: {', '.join(missing)}")
