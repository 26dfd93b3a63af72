"""Find the ranks that save and load together.

The ranks are those of echelon's world or of torch.distributed's default group. If neither exists,
this process saves and loads on its own.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import msgpack
import torch
import torch.distributed as torch_dist

from echelon.dist.checkpoint.disk.damage import DamagedError
from echelon.dist.group import ProcessGroup
from echelon.dist.runtime import world
from echelon.errors import CheckpointError

_DEFAULT_TIMEOUT_S = 600.0
_Result = TypeVar("_Result")


class Peers(Protocol):
    """A set of ranks that exchange plain objects and bytes. Every exchange is collective."""

    rank: int
    size: int
    timeout_s: float

    def gone(self) -> list[int]:
        """Return the lost ranks without which the job continues, or []. Not collective."""
        ...

    def all_gather(self, value: Any) -> list[Any]:
        """Return every rank's value, in rank order."""
        ...

    def all_gather_bytes(self, out: torch.Tensor, own: torch.Tensor) -> None:
        """Fill `out` [size * n] with every rank's `own` [n]; both are uint8 tensors on the CPU."""
        ...

    def all_to_all_bytes(self, sent: list[torch.Tensor], sizes: list[int]) -> list[torch.Tensor]:
        """Exchange bytes; return the bytes from each rank, in rank order, as uint8 CPU tensors.

        Args:
            sent: the bytes to send to each rank, in rank order; 1-D tensors of any size.
            sizes: the number of bytes to receive from each rank.
        """
        ...


class Alone:
    """A process that saves and loads by itself."""

    size = 1
    timeout_s = _DEFAULT_TIMEOUT_S

    def __init__(self, rank: int = 0) -> None:
        self.rank = rank

    def gone(self) -> list[int]:
        """Return an empty list, because this process has no peers."""
        return []

    def all_gather(self, value: Any) -> list[Any]:
        """Return a list with only this process's value."""
        return [value]

    def all_gather_bytes(self, out: torch.Tensor, own: torch.Tensor) -> None:
        """Copy `own` into `out`."""
        out.copy_(own)

    def all_to_all_bytes(self, sent: list[torch.Tensor], sizes: list[int]) -> list[torch.Tensor]:  # noqa: ARG002 -- of the interface
        """Return the bytes that this rank sends to itself."""
        return sent


class World:
    """The ranks of an echelon group."""

    def __init__(self, group: ProcessGroup) -> None:
        self.rank = group.rank
        self.size = group.size
        self.timeout_s = group.timeout_s
        self._group = group

    def gone(self) -> list[int]:
        """Return the ranks of this group that are missing from the current world."""
        try:
            left = world().ranks
        except ValueError:  # this rank has left the world
            return []
        return [rank for rank, number in enumerate(self._group.ranks) if number not in left]

    def all_gather(self, value: Any) -> list[Any]:
        """Return every rank's value, in rank order."""
        return self._group.all_gather_object(value)

    def all_gather_bytes(self, out: torch.Tensor, own: torch.Tensor) -> None:
        """Gather every rank's `own` into `out`."""
        self._group.all_gather(out, own)

    def all_to_all_bytes(self, sent: list[torch.Tensor], sizes: list[int]) -> list[torch.Tensor]:
        """Exchange bytes; return the bytes that each rank sent to this rank, in rank order."""
        out = torch.empty(sum(sizes), dtype=torch.uint8)
        splits = [tensor.numel() for tensor in sent]
        self._group.all_to_all(out, torch.cat(sent), output_splits=sizes, input_splits=splits)
        return list(torch.split(out, sizes))


class TorchWorld:
    """The ranks of torch.distributed's default group. Values are sent as msgpack."""

    def __init__(self) -> None:
        self.rank = torch_dist.get_rank()
        self.size = torch_dist.get_world_size()
        self.timeout_s = _DEFAULT_TIMEOUT_S
        self._device = _device_of(str(torch_dist.get_backend_config()))

    def gone(self) -> list[int]:
        """Return an empty list, because torch.distributed cannot continue after losing a rank."""
        return []

    def all_gather(self, value: Any) -> list[Any]:
        """Return every rank's value, in rank order."""
        data = torch.frombuffer(bytearray(msgpack.packb(value)), dtype=torch.uint8)
        sizes = self._gather(torch.tensor([data.numel()]))
        longest = int(max(sizes))
        padded = torch.nn.functional.pad(data, (0, longest - data.numel()))
        return [
            msgpack.unpackb(bytes(content[: int(size)].numpy()), strict_map_key=False)
            for content, size in zip(self._gather(padded), sizes, strict=True)
        ]

    def all_gather_bytes(self, out: torch.Tensor, own: torch.Tensor) -> None:
        """Fill `out` with every rank's `own`."""
        out.copy_(torch.cat(self._gather(own)))

    def all_to_all_bytes(self, sent: list[torch.Tensor], sizes: list[int]) -> list[torch.Tensor]:
        """Exchange bytes; return the bytes that each rank sent to this rank, in rank order."""
        splits = [tensor.numel() for tensor in sent]
        joined = torch.cat(sent).to(self._device)
        out = torch.empty(sum(sizes), dtype=torch.uint8, device=self._device)
        torch_dist.all_to_all_single(out, joined, sizes, splits)
        return list(torch.split(out.cpu(), sizes))

    def _gather(self, mine: torch.Tensor) -> list[torch.Tensor]:
        mine = mine.to(self._device)
        everyones = [torch.empty_like(mine) for _ in range(self.size)]
        torch_dist.all_gather(everyones, mine)
        return [theirs.cpu() for theirs in everyones]


def _device_of(config: str) -> torch.device:
    """Return a device on which a group can exchange tensors, preferably the CPU.

    Args:
        config: the group's backends, such as "cpu:gloo,cuda:nccl".
    """
    kinds = [part.partition(":")[0] for part in config.split(",")]
    if "cpu" in kinds or not kinds[0]:
        return torch.device("cpu")
    return torch.device(kinds[0], torch.get_device_module(kinds[0]).current_device())


def find(*, to_write: bool) -> Peers:
    """Return the ranks of this job.

    Args:
        to_write: whether the ranks will write a checkpoint. If the job has several ranks, writing
            requires a group.

    Raises:
        ValueError: `to_write` is set and the job has several ranks, but no group exists.
    """
    try:
        return World(world())
    except ValueError:
        pass  # there is none; a forked child of one meets the check below
    if torch_dist.is_available() and torch_dist.is_initialized():
        return TorchWorld()
    num_expected = os.environ.get("WORLD_SIZE", "1")
    if num_expected == "1":
        return Alone()
    if to_write:
        raise ValueError(
            f"WORLD_SIZE is {num_expected}, but there is no world: call echelon.dist.init() first"
        )
    return Alone(int(os.environ.get("RANK", "0")))


def together(peers: Peers, doing: str, action: Callable[[], _Result]) -> _Result:
    """Run `action` on every rank; return this rank's result, or raise an error if any rank failed.

    Collective. See `agree` for the errors.
    """
    error: Exception | None = None
    try:
        result = action()
    except Exception as raised:  # noqa: BLE001 -- raised below, once all ranks know
        error = raised
    agree(peers, error, doing)
    return result


def agree(peers: Peers, error: Exception | None, doing: str) -> None:
    """Raise an error on every rank if any rank failed. Collective.

    A rank that failed raises its own error, and the other ranks raise an error that names a failed
    rank. If every failure is a DamagedError, all ranks raise a DamagedError, so that all of them
    try an older version. If other errors also occurred, no rank raises a DamagedError.

    Raises:
        CheckpointError, DamagedError: another rank failed.
    """
    own = None
    if error is not None:
        own = [isinstance(error, DamagedError), f"{type(error).__name__}: {error}"]
    failed = {rank: one for rank, one in enumerate(peers.all_gather(own)) if one is not None}
    only_damage = all(is_damage for is_damage, _ in failed.values())
    if error is not None and isinstance(error, DamagedError) == only_damage:
        raise error
    for rank, (is_damage, reason) in failed.items():
        if is_damage == only_damage:
            kind = DamagedError if only_damage else CheckpointError
            raise kind(f"{doing}: rank {rank} failed: {reason}")
