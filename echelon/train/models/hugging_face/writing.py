"""Write a model or checkpoint to a folder that `transformers` can load, one tensor at a time.

If the folder already holds a model, that model's config.json is removed first, and the new
config.json is written last. A job that is killed therefore leaves behind the old model, the new
model, or a folder that cannot be loaded.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from echelon.dist.checkpoint import save
from echelon.dist.checkpoint.disk.files import NewFile, make_folder, sync_folder, write_whole
from echelon.dist.checkpoint.disk.manifest import StoredTensor, dtype_bytes
from echelon.dist.checkpoint.disk.source import Version
from echelon.dist.checkpoint.disk.tensor_bytes import dtype_named
from echelon.dist.checkpoint.foreign import safetensors_file
from echelon.dist.checkpoint.ranks.peers import find, together
from echelon.dist.checkpoint.state.entries import MODULE, module_state
from echelon.dist.checkpoint.state.held import dtype_name
from echelon.dist.checkpoint.state.shards import elements, is_divided, whole_shape
from echelon.train.models.config import ModelConfig
from echelon.train.models.hugging_face import config_file
from echelon.train.models.hugging_face.folder import INDEX, SINGLE
from echelon.train.models.hugging_face.names import TOKEN, Whole, wholes
from echelon.train.models.hugging_face.reading import config_of

MAX_PIECE_BYTES = 5_000_000_000  # the default of transformers
_STAGING = ".weights.tmp"
_KEY = "model"
_WEIGHT_DTYPES = ("float64", "float32", "bfloat16", "float16")


@dataclass(frozen=True)
class _How:
    """The options for writing a model.

    Raises:
        ValueError: the dtype or the size limit is invalid, or a key is not allowed in config.json.
    """

    dtype: torch.dtype | None
    max_piece_bytes: int
    extra: Mapping[str, Any]

    def __post_init__(self) -> None:
        if self.max_piece_bytes < 1:
            raise ValueError(f"max_piece_bytes must be at least 1, got {self.max_piece_bytes}")
        if self.dtype is not None and dtype_name(self.dtype) not in _WEIGHT_DTYPES:
            known = ", ".join(_WEIGHT_DTYPES)
            raise ValueError(f"dtype must be one of {known}, got {self.dtype}")
        config_file.check_extra(self.extra)


def save_pretrained(
    model: nn.Module,
    folder: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    max_piece_bytes: int = MAX_PIECE_BYTES,
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Write a model in the format of `transformers`: config.json and safetensors. Collective.

    A model that is distributed (by `fully_shard`, as DTensors, or in stages) is first saved as a
    checkpoint inside the folder, which temporarily doubles the required disk space. Rank 0 then
    writes one tensor at a time, and the other ranks wait for at most the world's timeout. Other
    files in the folder, such as those of a tokenizer, are left unchanged.

    Args:
        model: a `Transformer` or this rank's stage of a `Transformer`, optionally wrapped.
        folder: the folder to write, on a file system that all hosts share; created if it does not
            exist.
        dtype: the dtype in which the weights are stored; None means the dtype of the model's
            weights.
        max_piece_bytes: the size limit of one file in bytes; a larger tensor gets its own file.
        extra: further keys of config.json that do not affect what the model computes, such as
            `eos_token_id`.

    Raises:
        ValueError: `transformers` has no such model, or an argument is invalid.
        CheckpointError: another rank failed.
        OSError: this rank could not write its files.
    """
    target, config = Path(folder), config_of(model)
    config_file.family_of(config)
    how = _How(dtype, max_piece_bytes, extra or {})
    peers = find(to_write=True)
    doing = f"{target}: not written"
    tensors = {name: one for name, one in module_state(model).items() if isinstance(one, Tensor)}
    if peers.size == 1 and not any(is_divided(one) for one in tensors.values()):
        stored = {name: _stored(one) for name, one in _untied(tensors).items()}
        _write(target, config, stored, lambda name: elements(tensors[name]), how)
        return
    staging, is_first = target / _STAGING, peers.rank == 0
    together(peers, doing, lambda: _clear(staging) if is_first else None)
    try:
        save(staging, {_KEY: model}, keep=1)
        together(
            peers, doing, lambda: _convert(staging, target, config, None, how) if is_first else None
        )
    finally:
        if is_first:
            _clear(staging)


def convert(
    checkpoint: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    config: ModelConfig,
    *,
    key: str | None = None,
    dtype: torch.dtype | None = None,
    max_piece_bytes: int = MAX_PIECE_BYTES,
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Write a checkpoint's model in the format of `transformers`, in a single process.

    Args:
        checkpoint: the checkpoint's folder, or one version in that folder, saved by any number of
            ranks.
        folder: the folder to write; created if it does not exist.
        config: the model's config.
        key: the checkpoint's entry for the module; None means the only module in the checkpoint.
        dtype: the dtype in which the weights are stored; None means the dtype in the checkpoint.
        max_piece_bytes: the size limit of one file in bytes; a larger tensor gets its own file.
        extra: further keys of config.json that do not affect what the model computes, such as
            `eos_token_id`.

    Raises:
        CheckpointError: the checkpoint cannot be read.
        ValueError: the checkpoint has no such module, or its model has a different config.
        OSError: the folder cannot be written.
    """
    _convert(Path(checkpoint), Path(folder), config, key, _How(dtype, max_piece_bytes, extra or {}))


def _convert(
    checkpoint: Path, folder: Path, config: ModelConfig, key: str | None, how: _How
) -> None:
    config_file.family_of(config)
    source = Version(checkpoint)
    try:
        prefix = f"{_module_key(source, key)}/"
        stored = {
            path.removeprefix(prefix): source.manifest.tensors[path]
            for path in source.manifest.tensors
            if path.startswith(prefix)
        }

        def read(name: str) -> Tensor:
            out = torch.empty(stored[name].numel, dtype=dtype_named(stored[name].dtype))
            source.read(f"{prefix}{name}", 0, out)
            return out.reshape(stored[name].shape)

        _write(folder, config, stored, read, how)
    finally:
        source.close()


def _module_key(source: Version, key: str | None) -> str:
    modules = [path for path, kind in source.manifest.kinds.items() if kind == MODULE]
    if key is None and len(modules) == 1:
        return modules[0]
    if key not in modules or key is None:
        names = ", ".join(modules) or "none"
        wanted = (
            "pass key= to choose a module"
            if key is None
            else (f"{key} is not a module of this checkpoint")
        )
        raise ValueError(f"{source.path}: {wanted} (modules: {names})")
    return key


def _untied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors keyed by name; a tied tensor appears only under its first name."""
    names: dict[int, str] = {}
    for name, one in tensors.items():
        names.setdefault(id(one), name)
    return {name: tensors[name] for name in names.values()}


def _stored(tensor: Tensor) -> StoredTensor:
    return StoredTensor(whole_shape(tensor), dtype_name(tensor.dtype), ())


class _Writer:
    """A converter that produces tensors in the format of `transformers`, one at a time."""

    def __init__(
        self,
        stored: Mapping[str, StoredTensor],
        read: Callable[[str], Tensor],
        dtype: torch.dtype | None,
    ) -> None:
        self._stored = stored
        self._read = read
        self._dtype = dtype

    def stored(self, whole: Whole) -> StoredTensor:
        """Return the shape and the stored dtype of a tensor to be written."""
        dtype = self._stored[whole.parts[0].ours].dtype
        if self._dtype is not None:
            dtype = dtype_name(self._dtype)
        return StoredTensor(whole.shape, dtype, ())

    def make(self, whole: Whole) -> Tensor:
        """Read the parts of a tensor that is about to be written, and join them."""
        parts = []
        for part in whole.parts:
            one = self._read(part.ours)
            parts.append(one.t() if part.transposed else one)
        content = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
        return content.to(dtype_named(self.stored(whole).dtype))


def _write(
    folder: Path,
    config: ModelConfig,
    stored: Mapping[str, StoredTensor],
    read: Callable[[str], Tensor],
    how: _How,
) -> None:
    expected = wholes(config)
    _check(folder, expected, stored)
    writer = _Writer(stored, read, how.dtype)
    make_folder(folder)
    pieces = _pieces(expected, writer, how.max_piece_bytes)
    token = next(one for one in expected if one.parts[0].ours == TOKEN)
    settings = config_file.write_config(config, writer.stored(token).dtype, how.extra)
    unfinished = {name: folder / f".{name}.tmp" for name in pieces}
    try:
        for name, members in pieces.items():
            _write_piece(unfinished[name], members, writer)
        _put_in_place(folder, pieces, unfinished, writer, settings)
    finally:
        for path in unfinished.values():
            path.unlink(missing_ok=True)


def _check(
    folder: Path,
    expected: list[Whole],
    stored: Mapping[str, StoredTensor],
) -> None:
    """Check that the tensors are exactly the weights of the model.

    Raises:
        ValueError: a weight is missing, is unexpected, or has a different shape.
    """
    shapes = {part.ours: part.shape for one in expected for part in one.parts}
    there = set(stored)
    wrong = [name for name in shapes if name in there and stored[name].shape != shapes[name]]
    problems = [
        f"{what} {', '.join(names[:3])}{' ...' if len(names) > 3 else ''}"
        for what, names in (
            ("missing weights:", sorted(set(shapes) - there)),
            ("unexpected weights:", sorted(there - set(shapes))),
            ("weights of the wrong shape:", wrong),
        )
        if names
    ]
    if problems:
        raise ValueError(f"{folder}: the weights do not match the config ({'; '.join(problems)})")
    kinds = {stored[name].dtype for name in shapes}
    if not kinds <= {*_WEIGHT_DTYPES}:
        known = ", ".join(_WEIGHT_DTYPES)
        raise ValueError(
            f"{folder}: the dtype of each weight must be one of {known}, got "
            f"{', '.join(sorted(kinds))}"
        )


def _pieces(expected: list[Whole], writer: _Writer, max_piece_bytes: int) -> dict[str, list[Whole]]:
    """Distribute tensors across files in order; return each file's tensors, keyed by file name."""
    groups: list[list[Whole]] = [[]]
    filled = 0
    for one in expected:
        num_bytes = _num_bytes(writer.stored(one))
        if groups[-1] and filled + num_bytes > max_piece_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(one)
        filled += num_bytes
    if len(groups) == 1:
        return {SINGLE: groups[0]}
    return {
        f"model-{number:05d}-of-{len(groups):05d}.safetensors": group
        for number, group in enumerate(groups, start=1)
    }


def _write_piece(path: Path, members: list[Whole], writer: _Writer) -> None:
    path.unlink(missing_ok=True)  # of a job that was killed
    by_name = {one.name: one for one in members}
    stored = {one.name: writer.stored(one) for one in members}
    file = NewFile(path)
    try:
        safetensors_file.write(file, stored, lambda name: writer.make(by_name[name]))
        file.sync()
    finally:
        file.close()


def _put_in_place(
    folder: Path,
    pieces: Mapping[str, list[Whole]],
    unfinished: Mapping[str, Path],
    writer: _Writer,
    settings: bytes,
) -> None:
    """Replace the model in a folder: remove the old config first, and add the new config last."""
    for name in (config_file.NAME, INDEX, SINGLE):
        (folder / name).unlink(missing_ok=True)
        if name not in unfinished:
            (folder / f".{name}.tmp").unlink(missing_ok=True)  # of a job that was killed
    sync_folder(folder)
    for old in folder.glob("model-?????-of-?????.safetensors"):
        old.unlink()
    for name, path in unfinished.items():
        path.rename(folder / name)
    if len(pieces) > 1:
        write_whole(folder / INDEX, _index(pieces, writer), sync=True)
    sync_folder(folder)
    write_whole(folder / config_file.NAME, settings, sync=True)
    sync_folder(folder)


def _index(pieces: Mapping[str, list[Whole]], writer: _Writer) -> bytes:
    total = sum(_num_bytes(writer.stored(one)) for members in pieces.values() for one in members)
    content: dict[str, Any] = {
        "metadata": {"total_size": total},
        "weight_map": {one.name: name for name, members in pieces.items() for one in members},
    }
    return json.dumps(content, indent=2).encode() + b"\n"


def _num_bytes(stored: StoredTensor) -> int:
    return stored.numel * dtype_bytes(stored.dtype)


def _clear(staging: Path) -> None:
    """Remove the intermediate checkpoint."""
    if staging.exists():
        shutil.rmtree(staging)
