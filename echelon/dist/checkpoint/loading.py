"""Load a checkpoint on any number of ranks."""

from __future__ import annotations

import contextlib
import functools
import os
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from echelon.dist.checkpoint.disk.damage import DamagedError
from echelon.dist.checkpoint.disk.folder import candidates, read_manifest
from echelon.dist.checkpoint.disk.manifest import Manifest
from echelon.dist.checkpoint.disk.source import Source, Version, require
from echelon.dist.checkpoint.foreign.safetensors_file import SafetensorsFile
from echelon.dist.checkpoint.foreign.torch_file import TorchFile
from echelon.dist.checkpoint.ranks import pending
from echelon.dist.checkpoint.ranks.peers import Peers, agree, find, together
from echelon.dist.checkpoint.ranks.reading import read
from echelon.dist.checkpoint.remote import version as remote
from echelon.dist.checkpoint.remote.store import Remote, place_of
from echelon.dist.checkpoint.state.restore import Restore, plain_values
from echelon.errors import CheckpointError
from echelon.recorder import span


def load(path: str | os.PathLike[str], state: dict[str, Any]) -> dict[str, Any]:
    """Fill `state` in place from the checkpoint under `path`, and return it. Collective.

    Modules, optimizers, `RandomState`s, objects and tensors in `state` are filled in place. Plain
    values are replaced, or added if `state` does not contain them. Ranks that need the same data
    each read a part of it, and the checksum of every block is verified. If the newest version is
    damaged, all ranks load the next older version, and rank 0 issues a RuntimeWarning. If `path`
    names a single version, only that version is tried. The state is compared with the checkpoint's
    structure before anything is changed, but an error during reading leaves it partly filled.

    Args:
        path: the path or address passed to `save`, the path of a single version, a .safetensors
            file, or a file written by `torch.save` (a state_dict or a dict of states).
        state: a state with the structure of the saved state, or of a part of it.

    Raises:
        CheckpointError: no complete checkpoint exists, all checkpoints are damaged (the error names
            a file), or another rank failed.
        ValueError: the checkpoint does not match the state.
        TypeError: `state` is not a dict of entries.

    Example:
        >>> save("runs/gpt", {"model": model, "optimizer": optimizer, "step": 7})
        >>> state = load("runs/gpt", {"model": model, "optimizer": optimizer, "step": 0})
        >>> state["step"]
        7
    """
    chosen = place_of(path)
    peers = find(to_write=False)
    with span("checkpoint", f"load {chosen}"):
        agree(peers, pending.finish(must_end=False), f"{chosen}: the save before")
        doing = f"{chosen}: not loaded"
        is_first = peers.rank == 0 or peers.size == 1
        first_error = None
        tried: set[str] = set()
        while True:
            # One rank's choice: another job may be saving, or removing, at this moment.
            look = functools.partial(_choose, chosen, is_again=first_error is not None)
            mine = together(peers, doing, look if is_first else list[str])
            names = [name for name in peers.all_gather(mine)[0] if name not in tried]
            if not names:
                assert first_error is not None
                raise first_error
            tried.update(names)
            for place in map(place_of, names):
                if first_error is not None and is_first:
                    reason = f"{first_error}; loading {place} instead"
                    warnings.warn(reason, RuntimeWarning, stacklevel=2)
                try:
                    _fill(functools.partial(_open, place, state), state, peers, doing)
                    return state
                except DamagedError as error:
                    first_error = first_error or error


def load_source(
    path: Path, open_source: Callable[[Peers], Source], state: dict[str, Any]
) -> dict[str, Any]:
    """Fill `state` as `load` does, from a source in a foreign format. Collective.

    Args:
        path: the path to show in error messages and in the black box.
        open_source: a function that opens the source. It is called on every rank, and its argument
            represents the ranks that take part in the load.
        state: the state to fill.

    Raises:
        CheckpointError: the source cannot be read, or another rank failed.
        ValueError: the source does not match the state.
    """
    peers = find(to_write=False)
    with span("checkpoint", f"load {path}"):
        agree(peers, pending.finish(must_end=False), f"{path}: the save before")
        _fill(lambda: open_source(peers), state, peers, f"{path}: not loaded")
    return state


def _fill(
    open_source: Callable[[], Source], state: dict[str, Any], peers: Peers, doing: str
) -> None:
    """Fill the state from one source. Collective.

    Raises:
        DamagedError: the data on disk is damaged. All ranks raise this error.
    """
    with contextlib.ExitStack() as stack:
        source = together(peers, doing, open_source)
        stack.callback(source.close)
        restore = together(peers, doing, lambda: Restore(source, state, peers.rank, peers.size))
        _require_use(restore, source, peers)
        agree(peers, read(peers, source, restore.wanted), doing)
        together(peers, doing, restore.hand_over)


def peek(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the plain values of the newest checkpoint under `path`. Not collective.

    Values that contain tensors are omitted.

    Raises:
        CheckpointError: no complete checkpoint exists, or its manifest is damaged.

    Example:
        >>> save("runs/gpt", {"model": model, "step": 7})
        >>> peek("runs/gpt")
        {'step': 7}
    """
    root = place_of(path)
    places = _candidates(root)
    for place in places[:-1]:
        with contextlib.suppress(DamagedError):
            return plain_values(_read_manifest(place))
    return plain_values(_read_manifest(places[-1]))


def _candidates(path: Path | Remote) -> Sequence[Path | Remote]:
    return remote.candidates(path) if isinstance(path, Remote) else candidates(path)


def _read_manifest(path: Path | Remote) -> Manifest:
    return remote.read_manifest(path) if isinstance(path, Remote) else read_manifest(path)


def _choose(path: Path | Remote, *, is_again: bool) -> list[str]:
    """Return the versions to try to load, in order of preference.

    Args:
        path: the path that the caller passed.
        is_again: whether an earlier attempt to load has failed. In this case, the result is empty
            if no version exists. On the first attempt, an error is raised instead.
    """
    try:
        if isinstance(path, Remote):
            return [place.address for place in remote.candidates(path)]
        places = [path] if path.is_file() else candidates(path)
        return [str(place.absolute()) for place in places]
    except CheckpointError:
        if is_again:
            return []
        raise


def _open(path: Path | Remote, state: dict[str, Any]) -> Source:
    if isinstance(path, Path) and path.suffix == ".safetensors":
        return SafetensorsFile(path, state)
    if isinstance(path, Path) and path.is_file():
        return TorchFile(path, state)
    try:
        return remote.RemoteVersion(path) if isinstance(path, Remote) else Version(path)
    except DamagedError:
        raise
    except CheckpointError as error:  # it was complete when it was chosen: another job removed it
        raise DamagedError(str(error), path=error.path) from None


def _require_use(restore: Restore, source: Source, peers: Peers) -> None:
    """Check that every stored module tensor is requested by at least one rank.

    Raises:
        ValueError: a tensor is not requested by any rank.
    """
    everyones = [set(unused) for unused in peers.all_gather(restore.unused)]
    left = sorted(set.intersection(*everyones))
    require([f"{path} is in the checkpoint but not in this module" for path in left], source.path)
