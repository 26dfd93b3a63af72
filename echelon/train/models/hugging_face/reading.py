"""From a folder of `transformers` to a model here: whole, sharded, or a stage of a pipeline."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from echelon.dist.checkpoint.disk.source import Source
from echelon.dist.checkpoint.load import load_source
from echelon.dist.checkpoint.ranks.peers import Peers, find, together
from echelon.train.models.config import ModelConfig
from echelon.train.models.hugging_face.config_file import read_with_notes
from echelon.train.models.hugging_face.folder import KEY, HuggingFaceFolder
from echelon.train.models.transformer import Transformer

_FREE = ("context",)  # of a model with rotary positions, whose weights do not depend on it


def load_pretrained(
    folder: str | os.PathLike[str],
    *,
    context: int | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    ignore: Collection[str] = (),
) -> Transformer:
    """Return the model in a folder of `transformers`, whole. Collective in a world.

    A model that is too large to be whole is made on the meta device and sharded; `load_weights`
    fills the shards.

    Args:
        folder: with config.json and safetensors; see `read_config` for the models.
        context: the most tokens that a sequence may have; None: the folder's. Only where positions
            are rotary.
        dtype: of the weights; None: torch's default, whatever type is stored.
        device: where to make it.
        ignore: keys of config.json that are unknown here and do not matter.

    Raises:
        CheckpointError: the folder cannot be read, or holds a model that is not implemented.
        ValueError: a context for learned positions.
    """
    path, peers = Path(folder), find(to_write=False)
    found = together(peers, f"{path}: not loaded", lambda: _read_config(path, ignore, peers))
    config = found
    if context is not None and context != config.context:
        if config.positions == "learned":
            raise ValueError(f"context {context}: {folder} has {config.context} learned positions")
        config = replace(config, context=context)
    with torch.device("meta"):
        model = Transformer(config)
    if dtype is not None:
        model = model.to(dtype)
    model = model.to_empty(device=device)
    _load(path, model, lambda _: found)
    return model


def load_weights(
    folder: str | os.PathLike[str], model: nn.Module, *, ignore: Collection[str] = ()
) -> None:
    """Fill a model in place from a folder of `transformers`. Collective in a world.

    Every rank reads what it has: all of a model, its shards of one (`fully_shard`, DTensors), its
    stage. What several ranks have is read once and passed on, in windows of at most 64 MiB; of
    GPT-2, whose matrices are stored transposed, one at a time is read whole. Floating-point types
    are converted. An error that is found while tensors are read leaves the model partly filled;
    all others are found before. Ranks wait for each other as long as the world's timeout says.

    Args:
        folder: with config.json and safetensors; see `read_config` for the models.
        model: a `Transformer` or a stage of one, wrapped or not.
        ignore: keys of config.json that are unknown here and do not matter.

    Raises:
        CheckpointError: the folder cannot be read, or holds a model that is not implemented; also
            if another rank failed.
        ValueError: the model is another one.
    """
    path = Path(folder)
    _load(path, model, lambda peers: _read_config(path, ignore, peers))


def _load(path: Path, model: nn.Module, read: Callable[[Peers], ModelConfig]) -> None:
    wanted = config_of(model)

    def open_source(peers: Peers) -> Source:
        found = read(peers)
        _require_same(path, found, wanted)
        return HuggingFaceFolder(path, found, compare=_is_first(peers))

    load_source(path, open_source, {KEY: model})


def _read_config(path: Path, ignore: Collection[str], peers: Peers) -> ModelConfig:
    config, notes = read_with_notes(path, ignore)
    for note in notes if _is_first(peers) else []:
        warnings.warn(note, stacklevel=2)
    return config


def _is_first(peers: Peers) -> bool:
    return peers.rank == 0 or peers.size == 1


def config_of(model: nn.Module) -> ModelConfig:
    """Return the config of a model, whatever wraps it, or of a rank's stages.

    Raises:
        ValueError: it is not one of echelon's models.
    """
    parts = (getattr(one, "config", None) for one in model.modules())
    found = {config for config in parts if isinstance(config, ModelConfig)}
    if len(found) == 1:
        return found.pop()
    raise ValueError(f"{type(model).__name__} is not a Transformer or a stage of one")


def _require_same(path: Path, found: ModelConfig, wanted: ModelConfig) -> None:
    """Check that a model computes what the stored one does: shapes alone would not show it.

    Raises:
        ValueError: a setting differs.
    """
    there, here = found.to_dict(), wanted.to_dict()
    free = _FREE if found.positions == "rotary" else ()
    differ = [name for name in here if here[name] != there[name] and name not in free]
    if differ:
        settings = ", ".join(f"{name} {there[name]!r} (here {here[name]!r})" for name in differ)
        raise ValueError(f"{path}: another model: {settings}")
