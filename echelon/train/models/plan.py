"""Create plans that distribute a transformer, for `echelon.dist.parallel.parallelize`."""

from __future__ import annotations

from typing import Any

from echelon.dist.parallel.plan import Plan, TensorStyle
from echelon.train.models.config import ModelConfig
from echelon.train.models.stage import make_stage


def make_plan(config: ModelConfig) -> Plan:
    """Return the parallel plan for models with the given config.

    Each block is a unit of `fully_shard`. Tensor parallelism splits attention by heads, the
    feed-forward network by hidden features, and the embedding and the head by vocabulary.
    """
    attention, mlp = "blocks.*.attention", "blocks.*.mlp"
    gated = ("gate", "up") if config.mlp == "swiglu" else ("up",)
    tensor: dict[str, TensorStyle] = {"token": "vocabulary", "head": "head"}
    if config.positions == "learned":
        tensor["position"] = "embedding"
    tensor |= {attention: "region", f"{attention}.out": "row"}
    tensor |= {f"{attention}.{name}": "column" for name in ("query", "key", "value")}
    tensor |= {mlp: "region", f"{mlp}.down": "row"}
    tensor |= {f"{mlp}.{name}": "column" for name in gated}
    make: Any = make_stage  # applies to a Transformer, not to any module
    return Plan(
        blocks=("blocks.*",),
        tensor=tensor,
        stages=make,
        divisors={"heads": config.heads, "kv_heads": config.kv_heads, "hidden": config.hidden},
    )
