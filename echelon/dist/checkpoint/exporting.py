"""Export a checkpoint to a single file that other programs can read."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from echelon.dist.checkpoint.disk.files import NewFile, sync_folder
from echelon.dist.checkpoint.disk.source import Version
from echelon.dist.checkpoint.disk.tensor_bytes import dtype_named
from echelon.dist.checkpoint.foreign import safetensors_file
from echelon.dist.checkpoint.state.entries import MODULE, OBJECT, OPTIMIZER, RANDOM, shared_path
from echelon.dist.checkpoint.state.plain import TensorAt, unpack


def export(
    path: str | os.PathLike[str], file: str | os.PathLike[str], key: str | None = None
) -> None:
    """Write the contents of a checkpoint to one file. Not collective.

    If the file's name ends in .safetensors, the file contains the tensors of one module. Any other
    file can be read with `torch.load(..., weights_only=True)`, and contains either the entry `key`
    as a state_dict or a dict of all entries except random states. The file is created atomically.

    Args:
        path: the path of the checkpoint, or of one version of it.
        file: the file to write; replaced if it exists.
        key: the entry to write; None means all entries or, for safetensors, the only module.

    Raises:
        CheckpointError: the checkpoint cannot be read.
        ValueError: the entry `key` does not exist, or a safetensors file cannot hold all modules.

    Example:
        >>> save("runs/gpt", {"model": model, "step": 7})
        >>> export("runs/gpt", "gpt.pt", key="model")
        >>> weights = torch.load("gpt.pt", weights_only=True)
        >>> torch.equal(weights["token.weight"], model.token.weight)
        True
    """
    source, target = Version(Path(path)), Path(file)
    unfinished = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        if target.suffix == ".safetensors":
            _write_safetensors(source, unfinished, key or _only_module(source))
        else:
            content = _everything(source) if key is None else _entry(source, key)
            torch.save(content, unfinished)
            _sync(unfinished)
        unfinished.replace(target)
        sync_folder(target.absolute().parent)
    finally:
        source.close()
        unfinished.unlink(missing_ok=True)


def _only_module(source: Version) -> str:
    modules = [path for path, kind in source.manifest.kinds.items() if kind == MODULE]
    if len(modules) != 1:
        names = ", ".join(modules) or "none"
        raise ValueError(
            f"{source.path}: set key= to the name of the module to export (available modules: "
            f"{names})"
        )
    return modules[0]


def _write_safetensors(source: Version, path: Path, key: str) -> None:
    if source.manifest.kinds.get(key) != MODULE:
        raise ValueError(f"{source.path}: {key} is not a module of this checkpoint")
    prefix = f"{key}/"
    paths = _one_per_name(source.manifest.tensors, prefix)
    tensors = {name: source.manifest.tensors[path] for name, path in paths.items()}
    file = NewFile(path)  # tied weights once, as the format's own writer wants it
    try:
        safetensors_file.write(file, tensors, lambda name: _tensor(source, paths[name]))
        file.sync()
    finally:
        file.close()


def _one_per_name(paths: Iterable[str], prefix: str) -> dict[str, str]:
    """Map each name under a prefix to the path of its value.

    If several ranks stored their own values under a name, the lowest rank's path is used. The names
    do not include the prefix.
    """
    chosen: dict[str, tuple[int, str]] = {}
    for path in paths:
        if path.startswith(prefix):
            shared, rank = shared_path(path)
            name = shared.removeprefix(prefix)
            chosen[name] = min(chosen.get(name, (rank, path)), (rank, path))
    return {name: path for name, (_, path) in chosen.items()}


def _everything(source: Version) -> dict[str, Any]:
    return {
        key: _entry(source, key)
        for key, kind in source.manifest.kinds.items()
        if kind != RANDOM and (kind in (MODULE, OPTIMIZER) or key in source.manifest.values)
    }


def _entry(source: Version, key: str) -> Any:
    kind = source.manifest.kinds.get(key)
    if kind is None or kind == RANDOM:
        raise ValueError(f"{source.path}: the checkpoint has no {key} to export")
    if kind == OBJECT and key not in source.manifest.values:
        raise ValueError(f"{source.path}: {key} differs between ranks and cannot be exported")
    if kind == MODULE:
        return _module(source, f"{key}/")
    if kind == OPTIMIZER:
        return _optimizer(source, f"{key}/")
    return _resolve(source, unpack(source.manifest.values[key]))


def _module(source: Version, prefix: str) -> dict[str, Any]:
    manifest = source.manifest
    paths = _one_per_name([*manifest.tensors, *manifest.aliases], prefix)
    content: dict[str, Any] = {name: _tensor(source, path) for name, path in paths.items()}
    for name, path in paths.items():
        target = manifest.aliases.get(path, "").removeprefix(prefix)
        if target in content:
            content[name] = content[target]  # torch.save then keeps them tied
    for name, path in _one_per_name(manifest.values, prefix).items():
        content[name] = _resolve(source, unpack(manifest.values[path]))
    return content


def _optimizer(source: Version, prefix: str) -> dict[str, Any]:
    """Return an optimizer's state in torch's format, with numbered parameters."""
    values = {
        path.removeprefix(prefix): _resolve(source, unpack(value))
        for path, value in source.manifest.values.items()
        if path.startswith(prefix)
    }
    places = {
        path.removeprefix("parameter/"): tuple(value)
        for path, value in values.items()
        if path.startswith("parameter/")
    }
    settings = {(place[0], *place[2:]) for place in places.values()}
    if len(settings) > len({group for group, *_ in settings}):
        raise ValueError(
            f"{source.path}: {prefix.rstrip('/')} has parameter groups that were saved with "
            "different settings on different ranks: export each module separately by setting key="
        )
    order = sorted(places, key=lambda name: places[name])
    states: dict[int, dict[str, Any]] = {}
    for path, value in values.items():
        if path.startswith("state/"):
            name, _, entry = path.removeprefix("state/").rpartition("/")
            states.setdefault(order.index(name), {})[entry] = value
    groups: list[dict[str, Any]] = []
    while f"group/{len(groups)}" in values:
        number = len(groups)
        members = [index for index, name in enumerate(order) if places[name][0] == number]
        groups.append({**values[f"group/{number}"], "params": members})
    return {"state": states, "param_groups": groups}


def _resolve(source: Version, value: Any) -> Any:
    if isinstance(value, TensorAt):
        return _tensor(source, value.path)
    if isinstance(value, dict):
        return {key: _resolve(source, child) for key, child in value.items()}
    if isinstance(value, (list, tuple)):
        parts = [_resolve(source, child) for child in value]
        return tuple(parts) if isinstance(value, tuple) else parts
    return value


def _tensor(source: Version, path: str) -> Tensor:
    stored = source.manifest.tensor(path)
    assert stored is not None, path
    flat = torch.empty(stored.numel, dtype=dtype_named(stored.dtype))
    source.read(path, 0, flat)
    return flat.reshape(stored.shape)


def _sync(path: Path) -> None:
    with path.open("rb") as stream:
        os.fsync(stream.fileno())
