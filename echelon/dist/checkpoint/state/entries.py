"""List a state's entries with their kinds, and map the parameters of its modules to paths."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from echelon.dist.checkpoint.state.random_state import RandomState
from echelon.dist.checkpoint.state.shards import owner

MODULE, OPTIMIZER, RANDOM, OBJECT, VALUE = "module", "optimizer", "random", "object", "value"
_WRAPPERS = re.compile(r"(^|(?<=\.))(_orig_mod|_checkpoint_wrapped_module)\.")


def kind_of(value: Any) -> str:
    """Return the kind of an entry."""
    if isinstance(value, torch.nn.Module):
        return MODULE
    if isinstance(value, torch.optim.Optimizer):
        return OPTIMIZER
    if isinstance(value, RandomState):
        return RANDOM
    has_state = hasattr(value, "state_dict") and hasattr(value, "load_state_dict")
    return OBJECT if has_state and not isinstance(value, type) else VALUE


def entries(state: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str, Any]]:
    """Yield each entry's path, kind and value.

    Dicts that contain more than plain values are expanded. A pipeline is yielded as a module that
    contains the pipeline's stages.

    Raises:
        TypeError: a key is not a string, or the state is not a dict.
    """
    if not isinstance(state, Mapping):
        raise TypeError(f"a state must be a dict, not {type(state).__qualname__}")
    for key, given in state.items():
        if not isinstance(key, str) or not key or "/" in key:
            raise TypeError(f"{prefix}{key!r}: a state's keys must be strings without a slash")
        path = f"{prefix}{key}"
        value = _stages_of(given)
        kind = kind_of(value)
        if kind == VALUE and isinstance(value, dict) and _holds_more(value):
            yield from entries(value, f"{path}/")
        else:
            yield path, kind, value


def _stages_of(value: Any) -> Any:
    """Return a pipeline's stages as one module, and any other value unchanged."""
    pipelines = sys.modules.get("echelon.dist.pipeline.execute.run")  # else there is none
    if pipelines is not None and isinstance(value, pipelines.Pipeline):
        return value.module
    return value


def _holds_more(tree: dict[Any, Any]) -> bool:
    return any(
        kind_of(_stages_of(value)) != VALUE or (isinstance(value, dict) and _holds_more(value))
        for value in tree.values()
    )


def module_state(module: torch.nn.Module) -> dict[str, Any]:
    """Return a module's parameters, persistent buffers and extra states by name.

    Wrappers such as DistributedDataParallel and torch.compile do not affect the names.
    """
    if isinstance(module, torch.nn.parallel.DistributedDataParallel):
        module = module.module
    return {plain_name(name): value for name, value in module.state_dict(keep_vars=True).items()}


def plain_name(name: str) -> str:
    """Return a parameter's name without the components that wrappers added."""
    return _WRAPPERS.sub("", name)


def rank_path(path: str, rank: int) -> str:
    """Return the path of a value that is stored separately for one rank."""
    return f"{path}/@{rank}"


def shared_path(path: str) -> tuple[str, int]:
    """Split a path into the shared path and the rank, which is -1 if the path contains no rank."""
    shared, _, rank = path.rpartition("/@")
    return (shared, int(rank)) if shared and rank.isdigit() else (path, -1)


def parameter_names(found: list[tuple[str, str, Any]]) -> dict[int, str]:
    """Map the `id()` of each parameter in the entries' modules to its path."""
    names: dict[int, str] = {}
    for path, kind, module in found:
        if kind == MODULE:
            for name, value in module_state(module).items():
                if isinstance(value, Tensor):
                    names.setdefault(id(owner(value)), f"{path}/{name}")
    return names


def optimizer_names(
    optimizer: torch.optim.Optimizer, names: dict[int, str]
) -> Iterator[tuple[Tensor, str, int, int]]:
    """Yield an optimizer's parameters, each with its name, group and index within the group."""
    for group_index, group in enumerate(optimizer.param_groups):
        for position, parameter in enumerate(group["params"]):
            name = names.get(id(parameter), f"{group_index}.{position}")
            yield parameter, name, group_index, position


def only_module(state: Mapping[str, Any], path: Any) -> str:
    """Return the path of a state's only module.

    Raises:
        ValueError: the state does not have exactly one module.
    """
    modules = [name for name, kind, _ in entries(state) if kind == MODULE]
    if len(modules) != 1:
        raise ValueError(
            f"{path} contains the weights of one module, but the state has {len(modules)} modules"
        )
    return modules[0]
