"""Restore a state from a source.

The state is changed only after all its entries have been checked against the source.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from echelon.dist.checkpoint.disk.manifest import Manifest
from echelon.dist.checkpoint.disk.source import Source, check_fit, require
from echelon.dist.checkpoint.disk.tensor_bytes import dtype_named
from echelon.dist.checkpoint.state.collect import as_tensor
from echelon.dist.checkpoint.state.entries import (
    MODULE,
    OBJECT,
    OPTIMIZER,
    RANDOM,
    VALUE,
    entries,
    module_state,
    optimizer_names,
    parameter_names,
    plain_name,
    rank_path,
    shared_path,
)
from echelon.dist.checkpoint.state.held import Held
from echelon.dist.checkpoint.state.plain import TensorAt, unpack
from echelon.dist.checkpoint.state.random_state import RandomState
from echelon.dist.checkpoint.state.shards import (
    Local,
    elements,
    pieces,
    pieces_like,
    wrap,
)


class Restore:
    """A plan for restoring one rank's state from a source.

    Attributes:
        wanted: the tensors to fill, each with its path in the source.
        unused: stored tensors of the state's modules that this rank does not need.

    Raises:
        ValueError: entries are missing or do not match. The error lists the first three problems.
        TypeError: the state is not a dict of entries.
    """

    def __init__(
        self, source: Source, state: MutableMapping[str, Any], rank: int, world_size: int
    ) -> None:
        self._source = source
        self._rank = rank
        self._same_world = source.manifest.world_size == world_size
        self._ranks_of = _ranks_of(source.manifest)
        self._chosen: list[str] = []  # stored for each rank, of which this one takes another's
        self._state = state
        self._problems: list[str] = []
        self.wanted: list[tuple[Held, str]] = []
        self._handovers: list[Callable[[], None]] = []
        self._plain: dict[str, Any] = {}
        self._modules: list[str] = []
        self._used: set[str] = set()
        found = list(entries(state))
        names = parameter_names(found)
        for path, kind, value in found:
            self._plan(path, kind, value, names)
        self._plan_absent({path for path, _, _ in found})
        require(self._problems, source.path)
        self._warn_of_choices()
        self.unused = self._find_unused()

    def hand_over(self) -> None:
        """Pass the loaded values to the state's optimizers and objects; set its plain values."""
        for action in self._handovers:
            action()
        for path, value in self._plain.items():
            _put(self._state, path, value)

    # ---- what to read ----

    def _plan(self, path: str, kind: str, value: Any, names: dict[int, str]) -> None:
        stored_kind = self._source.manifest.kinds.get(path)
        if stored_kind is None:
            has = ", ".join(sorted(self._source.manifest.kinds)) or "nothing"
            self._problems.append(f"{path} is not in the checkpoint, which has: {has}")
        elif stored_kind != kind:
            self._problems.append(
                f"{path} is of kind {stored_kind} in the checkpoint, but {kind} here"
            )
        elif kind == MODULE:
            self._plan_module(path, value)
        elif kind == OPTIMIZER:
            self._plan_optimizer(path, value, names)
        elif kind == RANDOM:
            self._plan_random(path, value)
        elif kind == OBJECT:
            self._plan_object(path, value)
        else:
            self._plain[path] = self._tree(path, value)

    def _plan_absent(self, present: set[str]) -> None:
        """Add to the plan the stored plain values that are missing from the caller's dict."""
        for path, value in plain_values(self._source.manifest).items():
            if path not in present:
                self._plain[path] = value

    def _plan_object(self, path: str, value: Any) -> None:
        if path in self._ranks_of and not self._same_world:
            self._problems.append(
                f"{path} has a state for each of the {self._source.manifest.world_size} ranks "
                "that saved it and cannot be divided among a different number of ranks: leave "
                "it out"
            )
            return
        tree = self._tree(self._where(path), None)
        self._handovers.append(lambda: value.load_state_dict(tree))

    def _where(self, path: str) -> str:
        """Return the path from which this rank loads a value that can differ between ranks.

        If the world size is unchanged, each rank loads the value that it saved. Otherwise, and on
        ranks that saved none, the value saved by the lowest rank is loaded.
        """
        ranks = self._ranks_of.get(path)
        if ranks is None or not self._same_world:
            self._chosen += [path] if ranks else []
            return path if ranks is None else rank_path(path, ranks[0])
        return rank_path(path, self._rank if self._rank in ranks else ranks[0])

    def _warn_of_choices(self) -> None:
        if self._chosen and self._rank == 0:
            more = f" and {len(self._chosen) - 1} more" if len(self._chosen) > 1 else ""
            warnings.warn(
                f"{self._source.path}: {self._chosen[0]}{more} differ between the "
                f"{self._source.manifest.world_size} ranks that saved them; all ranks load the "
                "values from the lowest of those ranks",
                RuntimeWarning,
                stacklevel=2,
            )

    def _plan_module(self, path: str, module: torch.nn.Module) -> None:
        self._modules.append(path)
        state = module_state(module)
        extra = {name: value for name, value in state.items() if not isinstance(value, Tensor)}
        tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
        places = {name: self._where(f"{path}/{name}") for name in state}
        stored = {
            id(value)
            for name, value in tensors.items()
            if self._source.manifest.tensor(places[name])
        }
        for name, value in tensors.items():
            where = places[name]
            if id(value) in stored and self._source.manifest.tensor(where) is None:
                continue  # tied to one that is present
            self._want_tensor(where, value)
        loaded = {name: self._tree(places[name], None) for name in extra}
        if loaded:
            self._handovers.append(lambda: _load_extra(module, loaded))

    def _plan_optimizer(
        self, path: str, optimizer: torch.optim.Optimizer, names: dict[int, str]
    ) -> None:
        values = self._source.manifest.values
        groups = self._settings(path, optimizer, names)
        if f"{path}/group/{len(groups)}" in values:
            self._problems.append(
                f"{path} has more than {len(groups)} parameter groups in the checkpoint"
            )
        states: dict[str, list[str]] = {}
        for key in values:
            if key.startswith(f"{path}/state/"):
                name, _, entry = key.removeprefix(f"{path}/state/").rpartition("/")
                states.setdefault(name, []).append(entry)
        restored: dict[int, dict[str, Any]] = {}
        parameters = enumerate(optimizer_names(optimizer, names))
        for number, (parameter, own_name, group_index, position) in parameters:
            name = self._saved_name(own_name)
            if f"{path}/parameter/{name}" not in values:
                self._problems.append(f"{path} has no parameter {name} in the checkpoint")
            groups[group_index]["params"][position] = number
            if name in states:
                restored[number] = {
                    entry: self._tree(f"{path}/state/{name}/{entry}", None, like=parameter)
                    for entry in states[name]
                }
        content = {"state": restored, "param_groups": groups}
        self._handovers.append(lambda: optimizer.load_state_dict(content))

    def _saved_name(self, name: str) -> str:
        """Return the name under which a parameter was saved.

        The saved name can differ from `name` if the parameter is tied.
        """
        return self._source.manifest.aliases.get(name, name)

    def _settings(
        self, path: str, optimizer: torch.optim.Optimizer, names: dict[int, str]
    ) -> list[dict[str, Any]]:
        """Return the saved settings for each of an optimizer's parameter groups."""
        values = self._source.manifest.values
        places = [f"{path}/group/{index}" for index in range(len(optimizer.param_groups))]
        marks: list[set[str]] = [set() for _ in places]
        for _, name, group_index, _ in optimizer_names(optimizer, names):
            packed = values.get(f"{path}/parameter/{self._saved_name(name)}")
            marks[group_index].update(unpack(packed)[2:] if packed else [])
        for index, found in enumerate(marks):
            if len(found) == 1:
                places[index] = f"{path}/settings/{found.pop()}"
            elif found:
                self._problems.append(
                    f"{path}: group {index} here contains parameters that were saved with "
                    "different settings"
                )
        return [
            {**(self._tree(place, None) or {}), "params": list(range(len(group["params"])))}
            for place, group in zip(places, optimizer.param_groups, strict=True)
        ]

    def _plan_random(self, path: str, generators: RandomState) -> None:
        values = self._source.manifest.values
        own = values.get(f"{path}/{self._rank}")
        if own is not None:
            state = unpack(own)
            self._handovers.append(lambda: generators.load_state_dict(state))
        else:
            first = self._tree(f"{path}/0", None)
            self._handovers.append(lambda: generators.derive(first, self._rank))

    # ---- trees of values ----

    def _tree(self, path: str, here: Any, like: Tensor | None = None) -> Any:
        """Return the values under a path, including tensors that `read` will fill.

        Args:
            path: the path of the value.
            here: the caller's value, whose tensors and arrays are filled in place.
            like: the parameter to which the values belong, or None. Optimizer state that
                has one element per parameter element is sharded in the same way.
        """
        packed = self._source.manifest.values.get(path)
        if packed is None:
            self._problems.append(f"{path} is not in the checkpoint")
            return None
        return self._resolve(unpack(packed), here, like)

    def _resolve(self, value: Any, here: Any, like: Tensor | None) -> Any:
        if isinstance(value, TensorAt):
            return self._resolve_tensor(value, here, like)
        if isinstance(value, dict):
            there = here if isinstance(here, Mapping) else {}
            return {key: self._resolve(v, there.get(key), like) for key, v in value.items()}
        if isinstance(value, (list, tuple)):
            known = list(here) if isinstance(here, (list, tuple)) else []
            known += [None] * (len(value) - len(known))
            parts = [self._resolve(v, k, like) for v, k in zip(value, known, strict=False)]
            return tuple(parts) if isinstance(value, tuple) else parts
        return value

    def _resolve_tensor(self, at: TensorAt, here: Any, like: Tensor | None) -> Any:
        stored = self._source.manifest.tensor(at.path)
        if stored is None:
            self._problems.append(f"{at.path} is not in the checkpoint")
            return None
        if isinstance(here, Tensor):
            self._want_tensor(at.path, here)
            return here
        if isinstance(here, np.ndarray) and here.flags.writeable and here.flags.c_contiguous:
            self._want(Held(at.path, here.shape, as_tensor(here, at.path)), at.path)
            return here
        dtype = dtype_named(stored.dtype)
        if like is not None and at.role == "part":
            new = torch.empty(elements(like).shape, dtype=dtype)
            self._want_pieces(at.path, pieces_like(like, new))
            return wrap(new, like)
        new = torch.empty(stored.shape, dtype=dtype)
        self._want(Held(at.path, stored.shape, new), at.path)
        return new.numpy() if at.role == "array" else new

    def _want_tensor(self, path: str, tensor: Tensor) -> None:
        self._want_pieces(path, pieces(tensor))

    def _want_pieces(self, path: str, parts: list[Local]) -> None:
        for data, shape, start, sharded, repeats in parts:
            self._want(Held(path, shape, data, start, sharded, repeats), path)

    def _want(self, held: Held, path: str) -> None:
        self._used.add(path)
        reason = check_fit(self._source, held, path)
        if reason:
            self._problems.append(reason)
        else:
            self.wanted.append((held, path))

    def _find_unused(self) -> list[str]:
        manifest = self._source.manifest
        used = {shared_path(manifest.aliases.get(path, path))[0] for path in self._used}
        prefixes = tuple(f"{path}/" for path in self._modules)
        stored = {shared_path(path)[0] for path in manifest.tensors if path.startswith(prefixes)}
        return sorted(stored - used)


def _load_extra(module: torch.nn.Module, extra: dict[str, Any]) -> None:
    """Load saved extra state into a module."""
    if isinstance(module, torch.nn.parallel.DistributedDataParallel):
        module = module.module
    wrapped = {plain: name for name, plain in _extra_names(module)}
    module.load_state_dict({wrapped[name]: value for name, value in extra.items()}, strict=False)


def _extra_names(module: torch.nn.Module) -> list[tuple[str, str]]:
    return [(name, plain_name(name)) for name in module.state_dict(keep_vars=True)]


def _ranks_of(manifest: Manifest) -> dict[str, list[int]]:
    """Map each path under which ranks saved their own values to the list of those ranks."""
    found: dict[str, set[int]] = {}
    for path in [*manifest.tensors, *manifest.aliases, *manifest.values]:
        shared, rank = shared_path(path)
        if rank >= 0:
            found.setdefault(shared, set()).add(rank)
    return {path: sorted(ranks) for path, ranks in found.items()}


def plain_values(manifest: Manifest) -> dict[str, Any]:
    """Return the entries that are plain values without tensors, keyed by name."""
    values = {
        path: unpack(manifest.values[path])
        for path, kind in manifest.kinds.items()
        if kind == VALUE and "/" not in path
    }
    return {path: value for path, value in values.items() if not _has_tensors(value)}


def _has_tensors(tree: Any) -> bool:
    if isinstance(tree, dict):
        return any(_has_tensors(value) for value in tree.values())
    if isinstance(tree, (list, tuple)):
        return any(_has_tensors(value) for value in tree)
    return isinstance(tree, TensorAt)


def _put(state: MutableMapping[str, Any], path: str, value: Any) -> None:
    *folders, name = path.split("/")
    for folder in folders:
        state = state[folder]
    state[name] = value
