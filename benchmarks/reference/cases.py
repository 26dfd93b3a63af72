"""The cases to measure, one row each, compared with the eager case of the same kind."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Case:
    """One way to run a model.

    Attributes:
        name: the row's name.
        compiled: "" (eager), "whole" or "blocks".
        backend: torch.compile's backend.
        mode: torch.compile's mode: "max-autotune" or "".
        dtype: "float32", or a 16-bit type for autocast with float32 weights.
        attention: "causal", an SDPA backend's name, "document" or "window" (SDPA with a mask), or
            "flex document", "flex window".
        trains: True for forward, backward and optimizer; False for the forward without gradients.
        lengths: "fixed", or "varied" if every iteration has a different number of tokens.
        dynamic: torch.compile's argument `dynamic`.
        autograd: True if Compiled Autograd compiles the backward.
        sharded: True to apply `fully_shard` to each block and the model, in a world of one rank.
        peer: the row to which the ratio is relative.
    """

    name: str
    compiled: str = ""
    backend: str = "inductor"
    mode: str = ""
    dtype: str = "float32"
    attention: str = "causal"
    trains: bool = True
    lengths: str = "fixed"
    dynamic: bool | None = None
    autograd: bool = False
    sharded: bool = False
    peer: str = "eager"

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as a plain dict."""
        return asdict(self)


def _compiled() -> list[Case]:
    return [
        Case(name="eager"),
        Case(name="whole, backend eager", compiled="whole", backend="eager"),
        Case(name="whole, aot_eager", compiled="whole", backend="aot_eager"),
        Case(name="whole, inductor", compiled="whole"),
        Case(name="blocks, inductor", compiled="blocks"),
        Case(name="whole, inductor, max-autotune", compiled="whole", mode="max-autotune"),
        Case(name="fully_shard, eager", sharded=True),
        Case(name="fully_shard, blocks, inductor", sharded=True, compiled="blocks"),
        Case(name="fully_shard, whole, inductor", sharded=True, compiled="whole"),
    ]


def _precisions() -> list[Case]:
    found = []
    for dtype in ("bfloat16", "float16"):
        found += [
            Case(name=f"{dtype}, eager", dtype=dtype),
            Case(name=f"{dtype}, whole, inductor", dtype=dtype, compiled="whole"),
        ]
    return found


def _attentions() -> list[Case]:
    kernels = ("MATH", "FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION")
    found = [Case(name=f"SDPA {name}", attention=name) for name in kernels]
    found += [
        Case(name=f"SDPA {name}, bfloat16", attention=name, dtype="bfloat16",
             peer="bfloat16, eager") for name in kernels
    ]  # fmt: skip
    for mask in ("document", "window"):
        found += [
            Case(name=f"SDPA with a {mask} mask", attention=mask),
            Case(name=f"FlexAttention, {mask}", attention=f"flex {mask}", compiled="blocks",
                 peer=f"SDPA with a {mask} mask"),
            Case(name=f"forward, SDPA with a {mask} mask", attention=mask, trains=False,
                 peer="forward, eager"),
            Case(name=f"forward, FlexAttention, {mask}", attention=f"flex {mask}", trains=False,
                 compiled="blocks", peer=f"forward, SDPA with a {mask} mask"),
        ]  # fmt: skip
    return [*found, Case(name="forward, eager", trains=False, peer="forward, eager")]


def _shapes() -> list[Case]:
    eager = "lengths vary, eager"
    found = [Case(name=eager, lengths="varied", peer=eager)]
    for word, dynamic in (("automatic", None), ("always", True), ("never", False)):
        found.append(
            Case(name=f"lengths vary, blocks, dynamic {word}", lengths="varied", dynamic=dynamic,
                 compiled="blocks", backend="inductor", peer=eager)
        )  # fmt: skip
    return found


def _backwards() -> list[Case]:
    return [
        Case(name="Compiled Autograd, backend eager", autograd=True, backend="eager"),
        Case(name="Compiled Autograd, whole, inductor", autograd=True, compiled="whole"),
        Case(name="Compiled Autograd, fully_shard", autograd=True, sharded=True, backend="eager"),
    ]


CASES = [*_compiled(), *_precisions(), *_attentions(), *_shapes(), *_backwards()]
