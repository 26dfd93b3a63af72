"""Define configs of published models, for comparison with published results."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from echelon.train.models.config import ModelConfig, RotaryScaling

_GPT2: dict[str, dict[str, int]] = {
    "124m": {"layers": 12, "width": 768, "heads": 12},
    "355m": {"layers": 24, "width": 1024, "heads": 16},
    "774m": {"layers": 36, "width": 1280, "heads": 20},
    "1.5b": {"layers": 48, "width": 1600, "heads": 25},
}
_LLAMA: dict[str, dict[str, Any]] = {
    # 20M parameters: not a published size; for tests and first runs.
    "20m": {
        "layers": 6, "width": 384, "heads": 8, "kv_heads": 2, "hidden": 1024, "context": 512,
        "vocabulary": 16_384,
    },
    # Llama 3.2 1B
    "1b": {
        "layers": 16, "width": 2048, "heads": 32, "kv_heads": 8, "hidden": 8192,
        "context": 131_072, "vocabulary": 128_256, "rotary_base": 500_000.0, "tied": True,
        "rotary_scaling": RotaryScaling(kind="llama3", factor=32.0),
    },
    # Llama 3.1 8B
    "8b": {
        "layers": 32, "width": 4096, "heads": 32, "kv_heads": 8, "hidden": 14_336,
        "context": 131_072, "vocabulary": 128_256, "rotary_base": 500_000.0,
        "rotary_scaling": RotaryScaling(kind="llama3", factor=8.0),
    },
}  # fmt: skip


def gpt2(size: str = "124m", **changes: Any) -> ModelConfig:
    """Return the config of a GPT-2 model of size 124m, 355m, 774m or 1.5b.

    Args:
        size: the size, as listed above.
        changes: fields of the config to override, as in `gpt2(context=512, vocabulary=50304)`.

    Raises:
        ValueError: the size is unknown, or a changed field is invalid.
        TypeError: the value given for an integer field is not an integer.

    Example:
        >>> config = gpt2("124m", vocabulary=50304)
        >>> config.layers, config.width, config.heads
        (12, 768, 12)
    """
    shape = {
        "context": 1024, "vocabulary": 50_257, "norm": "layer", "mlp": "gelu",
        "positions": "learned", "tied": True, "bias": True,
    }  # fmt: skip
    return _changed(shape | _find(_GPT2, size), changes)


def llama(size: str = "20m", **changes: Any) -> ModelConfig:
    """Return the config of a Llama model: 20m (for tests), 1b (Llama 3.2) or 8b (Llama 3.1).

    Args:
        size: the size, as listed above.
        changes: fields of the config to override, as in `llama("1b", context=8192)`.

    Raises:
        ValueError: the size is unknown, or a changed field is invalid.
        TypeError: a field that must be an integer was set to a value of another type.

    Example:
        >>> config = llama("8b", context=4096)
        >>> config.layers, config.width, config.heads, config.kv_heads
        (32, 4096, 32, 8)
    """
    return _changed(_find(_LLAMA, size), changes)


def _find(sizes: dict[str, Any], size: str) -> dict[str, Any]:
    if size not in sizes:
        raise ValueError(f"unknown size {size!r}; use one of {', '.join(sizes)}")
    return dict(sizes[size])


def _changed(values: dict[str, Any], changes: dict[str, Any]) -> ModelConfig:
    names = {field.name for field in fields(ModelConfig)}
    unknown = sorted(set(changes) - names)
    if unknown:
        raise ValueError(f"unknown ModelConfig settings: {', '.join(unknown)}")
    return ModelConfig(**(values | changes))
