"""Read and write the rotary settings in config.json, which have an older and a newer form.

Up to version 4, `transformers` writes the keys `rope_theta` and `rope_scaling`. From version 5 on,
it writes the key `rope_parameters`, which holds both settings.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from echelon.errors import CheckpointError
from echelon.train.models.config import ModelConfig, RotaryScaling

_BASE = 10_000.0
_LLAMA3 = {
    "low_freq_factor": "low_frequency_factor",
    "high_freq_factor": "high_frequency_factor",
    "original_max_position_embeddings": "original_context",
}


class Reader(Protocol):
    """A reader of the keys of a config.json."""

    def get(self, key: str, default: Any) -> Any:
        """Return the value of a key in the file, or the default if the key is missing."""
        ...

    def error(self, reason: str) -> CheckpointError:
        """Return an error that names the file and gives the reason."""
        ...


def read_rope(reader: Reader) -> tuple[float, RotaryScaling | None]:
    """Return the base of the rotary frequencies and their scaling.

    Raises:
        CheckpointError: the kind of scaling is not implemented, one of its settings is unknown, or
            `rope_parameters` contradicts `rope_theta` or `rope_scaling`.
    """
    base = reader.get("rope_theta", None)
    scaling = reader.get("rope_scaling", None)
    both = reader.get("rope_parameters", None)
    for name, value in (("rope_scaling", scaling), ("rope_parameters", both)):
        if value is not None and not isinstance(value, Mapping):
            raise reader.error(f"{name} must be a JSON object with settings, got {value!r}")
    if both is not None:
        base_inside = both.get("rope_theta")
        if None not in (base, base_inside) and base != base_inside:
            raise reader.error(f"rope_theta is {base}, but rope_parameters gives {base_inside}")
        base = base_inside if base is None else base
    found = [_scaling(reader, one) for one in (scaling, both) if one is not None]
    if len(found) == 2 and found[0] != found[1]:
        raise reader.error("rope_scaling and rope_parameters contradict each other")
    return (_BASE if base is None else float(base)), (found[0] if found else None)


def write_rope(config: ModelConfig) -> dict[str, Any]:
    """Return the rotary settings as config.json keys that every `transformers` release reads."""
    scaling = config.rotary_scaling
    if scaling is None:
        return {"rope_theta": config.rotary_base, "rope_scaling": None}
    content: dict[str, Any] = {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.kind == "llama3":
        content |= {theirs: getattr(scaling, ours) for theirs, ours in _LLAMA3.items()}
    return {"rope_theta": config.rotary_base, "rope_scaling": content}


def _scaling(reader: Reader, given: Mapping[str, Any]) -> RotaryScaling | None:
    content = {key: value for key, value in given.items() if key != "rope_theta"}
    kinds = {content.pop(key) for key in ("rope_type", "type") if key in content}
    if content.pop("partial_rotary_factor", 1.0) != 1.0:
        raise reader.error("partial_rotary_factor is not implemented")
    if len(kinds) != 1:
        raise reader.error(
            f"rope scaling of kind {' and '.join(map(str, kinds)) or 'unknown'} is not implemented"
        )
    kind = kinds.pop()
    if kind == "default" and not content:
        return None
    expected = {"linear": {"factor"}, "llama3": {"factor", *_LLAMA3}}.get(kind)
    if expected is None or set(content) != expected:
        settings = ", ".join(sorted(content)) or "no settings"
        raise reader.error(f"rope scaling {kind!r} with {settings} is not implemented")
    return RotaryScaling(
        kind=kind, **{_LLAMA3.get(key, key): value for key, value in content.items()}
    )
