"""Parameters on the meta device: made and given their first values one unit at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


def make_real(
    parts: list[tuple[str, nn.Module]],
    ignored: set[int],
    device: torch.device | str | None,
    init: Callable[[nn.Module], Any] | None,
) -> None:
    """Replace what is on the meta device by real parameters and buffers with initial values.

    Args:
        parts: the unit's modules with their paths; those of inner units are real already.
        ignored: ids of parameters that are left alone.
        device: where to make them; None: the CPU.
        init: called with each of these modules after its `reset_parameters()`, if it has that.

    Raises:
        ValueError: a module can give its parameters no values.
    """
    target = torch.device("cpu") if device is None else torch.device(device)
    made: dict[int, nn.Parameter] = {}
    touched = [(path, module) for path, module in parts if _replace(module, made, ignored, target)]
    with torch.no_grad():
        for path, module in touched:
            reset = getattr(module, "reset_parameters", None)
            if callable(reset):
                reset()
            elif init is None:
                raise ValueError(
                    f"{path or 'the module'} ({type(module).__name__}) has parameters on the meta "
                    "device and no reset_parameters(); pass init=, which is called with it"
                )
            if init is not None:
                init(module)


def _replace(
    module: nn.Module, made: dict[int, nn.Parameter], ignored: set[int], device: torch.device
) -> bool:
    """Make a module's own parameters and buffers real, zero; return whether there were any."""
    found = False
    for name, parameter in module._parameters.items():
        if parameter is not None and parameter.is_meta and id(parameter) not in ignored:
            if id(parameter) not in made:
                real = torch.zeros_like(parameter, device=device)
                made[id(parameter)] = nn.Parameter(real, parameter.requires_grad)
            module._parameters[name] = made[id(parameter)]
            found = True
    for name, buffer in module._buffers.items():
        if buffer is not None and buffer.is_meta:
            module._buffers[name] = torch.zeros_like(buffer, device=device)
            found = True
    return found
