"""Save a state as a new version of a checkpoint."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from echelon.dist.checkpoint.disk.folder import Unfinished
from echelon.dist.checkpoint.disk.manifest import Manifest
from echelon.dist.checkpoint.disk.rank_file import RankFileWriter
from echelon.dist.checkpoint.ranks import pending
from echelon.dist.checkpoint.ranks.division import divide, settle
from echelon.dist.checkpoint.ranks.peers import Peers, agree, find, together
from echelon.dist.checkpoint.ranks.pending import PendingSave
from echelon.dist.checkpoint.remote.store import Remote, place_of
from echelon.dist.checkpoint.remote.version import RemoteUnfinished
from echelon.dist.checkpoint.state.collect import Contents, collect
from echelon.dist.checkpoint.state.held import Held
from echelon.dist.errors.build import named
from echelon.errors import CheckpointError
from echelon.recorder import last_step, span
from echelon.recorder.checkpoints import note_checkpoint

_LOOK_S = 0.05
_SHARED_S = 10.0  # after this, a folder that another rank made is not on a shared file system


_order = itertools.count(1)


class _LostPartError(CheckpointError):
    """Raised when a background save cannot finish because a required rank was lost."""


def save(
    path: str | os.PathLike[str],
    state: Mapping[str, Any],
    *,
    async_op: bool = False,
    keep: int = 2,
    timeout_s: float | None = None,
) -> PendingSave | None:
    """Save a state under `path`, which must be accessible from all hosts. Collective.

    A state is a dict, possibly nested, of modules, optimizers, `RandomState`s, objects with
    `state_dict` and `load_state_dict` methods, tensors and plain values. Ranks that hold the same
    tensor verify that their copies are equal, and then each write a part of it. Each rank writes
    its own shards. Buffers, extra state and objects' states are saved once if they are equal on all
    ranks, and otherwise once per rank. Plain values are taken from rank 0, and random states are
    saved for each rank. An optimizer's parameters take their names from the modules in the same
    state.

    The previous checkpoint remains loadable until the new one is complete. While ranks wait for
    each other, the group's timeout applies; in a background save, `timeout_s` applies instead.

    Args:
        path: a folder, created if it does not exist, or the address of a folder in an object store,
            such as `s3://bucket/run`.
        state: the state to save.
        async_op: whether to copy the state and write the copy in the background. An error is raised
            by `wait`, by the next save or by `shutdown`. If none of these raises it, the error
            makes the program fail at exit.
        keep: how many versions to keep under `path`, including the new version.
        timeout_s: how long ranks wait for each other in the background; None means the world's
            timeout.

    Returns:
        The save in progress if `async_op` is set, otherwise None.

    Raises:
        TypeError: the state holds something that cannot be saved.
        ValueError: a tensor cannot be saved, or ranks hold different tensors under the same name.
        CheckpointError: another rank failed or did not join, or the previous save is still
            running.
        OSError: this rank could not write its part. The previous version still exists.

    Example:
        >>> save("runs/gpt", {"model": model, "optimizer": optimizer, "step": 7})
        >>> pending = save("runs/gpt", {"model": model, "step": 8}, async_op=True)
        >>> pending.wait()
    """
    if keep < 1:
        raise ValueError(
            f"keep must be at least 1, because this checkpoint is always kept; got {keep}"
        )
    root = place_of(path)
    if isinstance(root, Path) and (
        root.suffix in (".pt", ".pth", ".safetensors") or root.is_file()
    ):
        raise ValueError(
            f"{root}: a checkpoint is a folder, not a file; use `export` to convert a "
            "checkpoint to a single file"
        )
    peers = find(to_write=True)
    return begin(root, state, peers, async_op=async_op, keep=keep, timeout_s=timeout_s)


def begin(
    root: Path | Remote,
    state: Mapping[str, Any],
    peers: Peers,
    *,
    async_op: bool,
    keep: int,
    timeout_s: float | None,
    then: Callable[[], None] | None = None,
) -> PendingSave | None:
    """Perform `save`, and call `then` on rank 0 once the version is committed.

    An OSError or CheckpointError raised by `then` is ignored.
    """
    limit_s = peers.timeout_s if timeout_s is None else timeout_s
    with span("checkpoint", f"save {root}"):
        job = _prepare(root, state, peers, keep=keep, timeout_s=limit_s)
        job.then = then
        job.step = last_step()
        if async_op:
            job.snapshot()
            return pending.start(str(root), job.run_apart, limit_s)
        job.run_together()
    return None


def _prepare(
    root: Path | Remote, state: Mapping[str, Any], peers: Peers, *, keep: int, timeout_s: float
) -> _Job:
    """Agree with the other ranks on what to save, where to save it, and which rank writes what."""
    doing = f"{root}: not saved"
    agree(peers, _unless_lost(peers, pending.finish()), f"{root}: the save before")
    contents = together(peers, doing, lambda: collect(state, peers.rank))
    settle(peers, doing, contents)
    mine = divide(peers, doing, contents.held, contents.aliases)
    made = together(peers, doing, lambda: _create(root) if peers.rank == 0 else "")
    unfinished = _open(peers.all_gather(made)[0])
    together(peers, doing, lambda: _require_shared(unfinished))
    return _Job(
        unfinished=unfinished,
        contents=contents,
        mine=mine,
        peers=peers,
        keep=keep,
        timeout_s=timeout_s,
    )


def _unless_lost(peers: Peers, error: Exception | None) -> Exception | None:
    """Warn about an error that a lost rank caused, and return any other error."""
    if not isinstance(error, _LostPartError):
        return error
    if peers.rank == 0:
        warnings.warn(f"{error}. The next save will run as usual", RuntimeWarning, stacklevel=2)
    return None


def _create(root: Path | Remote) -> str:
    if isinstance(root, Remote):
        return RemoteUnfinished.create(root).path.address
    return str(Unfinished.create(root.absolute()).path)


def _open(path: str) -> Unfinished | RemoteUnfinished:
    place = place_of(path)
    return RemoteUnfinished(place) if isinstance(place, Remote) else Unfinished(place)


def _require_shared(unfinished: Unfinished | RemoteUnfinished) -> None:
    deadline_s = time.monotonic() + _SHARED_S
    while not unfinished.is_seen():
        if time.monotonic() > deadline_s:
            raise CheckpointError(
                f"{unfinished.path}: rank 0 created this folder, but it is not visible to this "
                "rank: all hosts must share this file system",
                path=str(unfinished.path),
            )
        time.sleep(_LOOK_S)


@dataclass(kw_only=True)
class _Job:
    """The part of a save that one rank carries out."""

    unfinished: Unfinished | RemoteUnfinished
    contents: Contents
    mine: list[Held]
    peers: Peers
    keep: int
    timeout_s: float
    then: Callable[[], None] | None = None
    step: int | None = None  # at which it was begun
    order: int = field(default_factory=lambda: next(_order))
    is_unwanted: Callable[[], bool] = lambda: False

    def snapshot(self) -> None:
        """Copy the data that this rank will write, so that later changes do not affect the save."""
        held = self.mine
        self.mine = [_copy(one) for one in held]
        self.contents.held = []
        for device in {one.data.device for one in held if one.data.is_cuda}:
            torch.cuda.current_stream(device).synchronize()  # of the copies: other streams continue

    def run_together(self) -> None:
        """Write and commit the version, and exchange results with the other ranks."""
        doing = f"{self.unfinished.final.parent}: not saved"
        is_first = self.peers.rank == 0
        try:
            together(self.peers, doing, self._write)
            together(self.peers, doing, self._commit if is_first else _nothing)
        except (CheckpointError, OSError, ValueError):
            if is_first:  # all have stopped writing; a full disk should not stay full
                self.unfinished.discard()
            raise

    def run_apart(self, deadline_s: float, is_unwanted: Callable[[], bool]) -> None:
        """Write and commit the version, polling for the other ranks' files.

        The ranks do not communicate, so the group remains available for training.
        """
        self.is_unwanted = is_unwanted
        try:
            self._write()
            if self.peers.rank == 0:
                self._wait_for(deadline_s, lambda: not self.unfinished.missing(self.peers.size))
                self._require_time(deadline_s)  # the other ranks have given up by then
                self._commit()
        except Exception as error:
            if not isinstance(error, CheckpointError):  # else another rank has said it
                reason = f"{type(error).__name__}: {error}"
                with contextlib.suppress(OSError):  # the others then wait until their deadline
                    self.unfinished.add_failure(self.peers.rank, reason)
            raise
        if self.peers.rank != 0:
            self._wait_for(deadline_s, self.unfinished.is_committed)

    def _write(self) -> None:
        with self.unfinished.local_folder() as folder:
            writer = RankFileWriter(folder, self.peers.rank)
            try:
                for one in self.mine:
                    self._require_wanted()
                    writer.append(one)
                stored = writer.finish()
            finally:
                writer.close()
            self.unfinished.publish(folder / stored.name, self.timeout_s)
        part = Manifest(
            world_size=self.peers.size,
            save=self.unfinished.token,
            kinds=self.contents.kinds,
            tensors=writer.tensors,
            aliases=self.contents.aliases,
            values=self.contents.values,
            files={self.peers.rank: stored},
        )
        self.unfinished.add_index(self.peers.rank, part)

    def _commit(self) -> None:
        self.unfinished.commit(self.peers.size, self.keep)
        root = self.unfinished.final.parent
        if isinstance(root, Path):  # a launcher looks for folders
            _announcements.add(self.order, root, self.step)
        if self.then is not None:
            with contextlib.suppress(OSError, CheckpointError):
                self.then()

    def _wait_for(self, deadline_s: float, is_there: Callable[[], bool]) -> None:
        root = self.unfinished.final.parent
        while not is_there():
            failure = self.unfinished.failure()
            if failure is not None:
                raise CheckpointError(
                    f"{root}: the checkpoint was not saved: {failure}", path=str(root)
                )
            self._require_time(deadline_s)
            self._require_ranks(is_there)
            time.sleep(_LOOK_S)

    def _require_ranks(self, is_there: Callable[[], bool]) -> None:
        """Raise an error if a rank was lost before it completed its part of this save."""
        gone = self.peers.gone()
        if not gone:
            return
        lost = [rank for rank in self.unfinished.missing(self.peers.size) if rank in gone]
        if 0 in gone and not lost:
            lost = [0]  # which was to commit
        if not lost or is_there():  # completed just now
            return
        root = self.unfinished.final.parent
        were = "was" if len(lost) == 1 else "were"
        raise _LostPartError(
            f"{root}: the checkpoint was not saved, because {named(lost)} {were} lost",
            path=str(root),
        )

    def _require_wanted(self) -> None:
        if self.is_unwanted():
            root = self.unfinished.final.parent
            raise CheckpointError(
                f"{root}: the checkpoint was not saved, because the program is exiting",
                path=str(root),
            )

    def _require_time(self, deadline_s: float) -> None:
        self._require_wanted()
        if time.monotonic() <= deadline_s:
            return
        root = self.unfinished.final.parent
        missing = self.unfinished.missing(self.peers.size)
        raise CheckpointError(
            f"{root}: the checkpoint was not saved within {self.timeout_s:g} s; ranks whose "
            "parts are missing: "
            f"{', '.join(map(str, missing)) or 'none, but rank 0 did not finish'}",
            path=str(root),
        )


class _Announcements:
    """The committed saves that this rank has announced to the launcher."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last = 0

    def add(self, order: int, root: Path, step: int | None) -> None:
        """Announce a committed save, unless a save that began later was already announced."""
        with self._lock:
            if order > self._last:
                self._last = order
                note_checkpoint(root, step)


_announcements = _Announcements()


def _copy(held: Held) -> Held:
    data = held.data
    if data.device.type == "cpu":
        return dataclasses.replace(held, data=data.clone())
    if data.device.type != "cuda":  # elsewhere a copy that does not block may outlive this call
        return dataclasses.replace(held, data=data.cpu())
    pinned = torch.empty(data.shape, dtype=data.dtype, pin_memory=True)  # torch keeps such memory
    return dataclasses.replace(held, data=pinned.copy_(data, non_blocking=True))


def _nothing() -> None:
    return None
