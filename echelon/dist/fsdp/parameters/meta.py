"""Allocate and initialize parameters that are on the meta device, one unit at a time."""

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
    """Allocate and initialize a unit's parameters and buffers that are on the meta device.

    Each parameter remains the same Python object, so tied parameters and existing optimizers remain
    valid.

    Args:
        parts: the unit's modules with their paths.
        ignored: the `id()` of each parameter to leave unchanged.
        device: where to allocate the parameters and buffers; None means the CPU.
        init: a function that is called with every module that has meta parameters or buffers,
            after the module's `reset_parameters()` if it has one.

    Raises:
        ValueError: a module cannot initialize its parameters or buffers.
    """
    target = torch.device("cpu") if device is None else torch.device(device)
    touched = [(path, module) for path, module in parts if _is_on_meta(module, ignored)]
    for _, module in touched:
        _materialize(module, ignored, target)
    buffers = {
        f"{path}.{name}" if path else name: (module, name, buffer, buffer._version)
        for path, module in touched
        for name, buffer in module._buffers.items()
        if buffer is not None and getattr(buffer, _FRESH, False)
    }
    with torch.no_grad():
        for path, module in touched:
            _initialize(path, module, init)
    for title, (module, name, buffer, version) in buffers.items():
        if module._buffers[name] is buffer and buffer._version == version:
            raise ValueError(
                f"buffer {title!r} is on the meta device, and neither reset_parameters() of "
                f"{type(module).__name__} nor init= gave the buffer a value; compute the value "
                "in one of them, or create the module on a real device"
            )


_swap: Any = torch.utils.swap_tensors  # untyped there
_FRESH = "_echelon_fresh"


def _is_on_meta(module: nn.Module, ignored: set[int]) -> bool:
    return any(
        tensor is not None and tensor.is_meta and id(tensor) not in ignored
        for tensor in (*module._parameters.values(), *module._buffers.values())
    )


def _materialize(module: nn.Module, ignored: set[int], device: torch.device) -> None:
    """Allocate a module's own meta parameters and buffers, filled with zeros."""
    for parameter in module._parameters.values():
        if parameter is not None and parameter.is_meta and id(parameter) not in ignored:
            real = nn.Parameter(torch.zeros_like(parameter, device=device), parameter.requires_grad)
            real.__class__ = type(parameter)
            real.__dict__.update(parameter.__dict__)
            parameter.grad = None
            _swap(parameter, real)
    for name, buffer in module._buffers.items():
        if buffer is not None and buffer.is_meta:
            real_buffer = torch.zeros_like(buffer, device=device)
            setattr(real_buffer, _FRESH, True)
            module._buffers[name] = real_buffer


def _initialize(path: str, module: nn.Module, init: Callable[[nn.Module], Any] | None) -> None:
    reset = getattr(module, "reset_parameters", None)
    if callable(reset):
        reset()
    elif init is None:
        raise ValueError(
            f"{path or 'the module'} ({type(module).__name__}) has parameters or buffers on "
            "the meta device and no reset_parameters(); pass init=, a function that "
            "initializes such a module"
        )
    if init is not None:
        init(module)
