"""Load a state into any number of ranks, whatever number saved it."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

from echelon.dist.checkpoint.disk.folder import newest, read_manifest
from echelon.dist.checkpoint.disk.source import Source, Version, require
from echelon.dist.checkpoint.foreign.safetensors_file import SafetensorsFile
from echelon.dist.checkpoint.foreign.torch_file import TorchFile
from echelon.dist.checkpoint.ranks import pending
from echelon.dist.checkpoint.ranks.peers import Peers, agree, find, together
from echelon.dist.checkpoint.state.restore import Restore, plain_values
from echelon.recorder import span


def load(path: str | os.PathLike[str], state: dict[str, Any]) -> dict[str, Any]:
    """Fill `state` in place with what was saved under `path`, and return it. Collective.

    Modules, optimizers, `RandomState`s, objects and tensors in `state` take the saved state over;
    plain values are replaced, and plain values that `state` does not mention are added. Each rank
    reads only what it holds, and checks every block that it reads. An error found while reading
    leaves the state partly filled; what does not fit is found before anything is changed.

    Args:
        path: what `save` was given, or one version in it; a file of `torch.save` with a state_dict,
            alone or in a dict (read without unpickling objects); or a .safetensors file.
        state: as it was saved, or a part of it.

    Raises:
        CheckpointError: there is no complete checkpoint, or a file of it is damaged; names it. Also
            if another rank failed.
        ValueError: the checkpoint does not fit the state.
        TypeError: `state` is no dict of entries.
    """
    chosen = Path(path)
    peers = find(to_write=False)
    with span("checkpoint", f"load {chosen}"), contextlib.ExitStack() as stack:
        agree(peers, pending.finish(), f"{chosen}: the save before")
        doing = f"{chosen}: not loaded"
        is_first = peers.rank == 0 or peers.size == 1
        version = together(peers, doing, lambda: _choose(chosen) if is_first else "")
        where = Path(peers.all_gather(version)[0])  # one choice: somebody may be saving
        source = together(peers, doing, lambda: _open(where, state))
        stack.callback(source.close)
        restore = together(peers, doing, lambda: Restore(source, state, peers.rank))
        _require_use(restore, source, peers)
        together(peers, doing, restore.read)
        together(peers, doing, restore.hand_over)
    return state


def peek(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the plain values of the newest checkpoint under `path`; needs no other ranks.

    Tells what a checkpoint is of, before anything is built or loaded. Values that hold tensors are
    left out.

    Raises:
        CheckpointError: there is no complete checkpoint, or its manifest is damaged.
    """
    manifest = read_manifest(newest(Path(path)))
    return plain_values(manifest)


def _choose(path: Path) -> str:
    return str((path if path.is_file() else newest(path)).absolute())


def _open(path: Path, state: dict[str, Any]) -> Source:
    if path.suffix == ".safetensors":
        return SafetensorsFile(path, state)
    return TorchFile(path, state) if path.is_file() else Version(path)


def _require_use(restore: Restore, source: Source, peers: Peers) -> None:
    """Check that what is stored of the modules is wanted by some rank.

    Raises:
        ValueError: a tensor is wanted by none: the model is another one.
    """
    everyones = [set(unused) for unused in peers.all_gather(restore.unused)]
    left = sorted(set.intersection(*everyones))
    require([f"{path} is in it, and not in the module here" for path in left], source.path)
