"""Load a `transformers` folder into a whole model, a sharded model or a pipeline stage."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from echelon.dist.checkpoint.disk.source import Source
from echelon.dist.checkpoint.loading import load_source
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
    """Load the whole model from a `transformers` folder. Collective if a world exists.

    If the whole model is too large for one rank, create it on the meta device, shard it, and fill
    the shards with `load_weights`.

    Args:
        folder: a folder that contains config.json and safetensors files; see `read_config` for the
            supported models.
        context: the maximum number of tokens in a sequence; None means the context in the folder's
            config. Only models with rotary positions support a different context.
        dtype: the dtype of the weights; None means torch's default dtype, regardless of the stored
            dtype.
        device: the device on which to create the model.
        ignore: keys of config.json that are unknown to echelon and do not affect what the model
            computes.

    Raises:
        CheckpointError: the folder cannot be read, or holds a model that is not implemented.
        ValueError: a context was passed for a model with learned positions.
    """
    path, peers = Path(folder), find(to_write=False)
    found = together(peers, f"{path}: not loaded", lambda: _read_config(path, ignore, peers))
    config = found
    if context is not None and context != config.context:
        if config.positions == "learned":
            raise ValueError(
                f"context cannot be {context}, because the model in {folder} has "
                f"{config.context} learned positions"
            )
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
    """Fill a model in place from a `transformers` folder. Collective if a world exists.

    Every rank loads its part: the whole model, its shards (`fully_shard`, DTensors), or its stage.
    Data that several ranks need is read once and sent to the other ranks, in windows of at most 64
    MiB. GPT-2's matrices, which are stored transposed, are read whole, one at a time.
    Floating-point values are converted to the model's dtype. An error while tensors are being read
    leaves the model partly filled; all other errors are raised before any tensor is read. Ranks
    wait for each other for at most the world's timeout.

    Args:
        folder: a folder that contains config.json and safetensors files; see `read_config` for the
            supported models.
        model: a `Transformer` or a stage of a `Transformer`, optionally wrapped.
        ignore: keys of config.json that are unknown to echelon and do not affect what the model
            computes.

    Raises:
        CheckpointError: the folder cannot be read or holds a model that is not implemented, or
            another rank failed.
        ValueError: the model does not match the folder's config.
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
    """Return the config of a model (wrapped or not) or of a rank's stages.

    Raises:
        ValueError: the module is not one of echelon's models.
    """
    parts = (getattr(one, "config", None) for one in model.modules())
    found = {config for config in parts if isinstance(config, ModelConfig)}
    if len(found) == 1:
        return found.pop()
    raise ValueError(f"{type(model).__name__} is not a Transformer or a stage of one")


def _require_same(path: Path, found: ModelConfig, wanted: ModelConfig) -> None:
    """Check that a model computes the same function as the stored model.

    Raises:
        ValueError: the two configs differ in a setting.
    """
    there, here = found.to_dict(), wanted.to_dict()
    free = _FREE if found.positions == "rotary" else ()
    differ = [name for name in here if here[name] != there[name] and name not in free]
    if differ:
        settings = ", ".join(f"{name} {there[name]!r} (not {here[name]!r})" for name in differ)
        raise ValueError(f"{path}: the folder contains a different model: {settings}")
