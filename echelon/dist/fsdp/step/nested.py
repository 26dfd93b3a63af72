"""Find and replace the tensors in nested tuples, lists, dicts and dataclasses."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield every tensor in a nested value."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_in(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name))


def map_tensors(change: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """Return a copy of a nested value, with a function applied to every tensor."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if not any(True for _ in tensors_in(value)):
        return value
    if isinstance(value, dict):
        changed = [(key, map_tensors(change, item)) for key, item in value.items()]
        return type(value)(changed)
    if isinstance(value, (tuple, list)):
        items = [map_tensors(change, item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {
            field.name: map_tensors(change, getattr(value, field.name))
            for field in dataclasses.fields(value)
            if field.init
        }
        return dataclasses.replace(value, **fields)
    return value
