"""Provide torchft's managers with a process group that runs on echelon's engines.

torchft (tested with 0.2.0) lets replica groups train independently of one another. The managers of
all processes agree on the participants, and each manager configures a process group for the
participants. This module is separate from the torch backend because torchft is an optional package
that no other module imports. The group itself is implemented in `torch_backend/reconfigurable.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar, cast

from torch.distributed import BroadcastOptions

from echelon.dist.options import Options
from echelon.dist.torch_backend.create import seconds
from echelon.dist.torch_backend.group import TorchGroup
from echelon.dist.torch_backend.reconfigurable import Reconfigurable

try:
    from torchft.process_group import ProcessGroup
except ImportError as err:
    raise ImportError(
        f"echelon.dist.torchft needs torchft ({err}): pip install 'echelon[torchft]'"
    ) from err

__all__ = ["ProcessGroupEchelon"]

_Method = TypeVar("_Method", bound=Callable[..., Any])


def _of_group(method: _Method) -> _Method:
    """Return a method that calls `method` with the current group as `self`."""

    @functools.wraps(method)
    def call(self: ProcessGroupEchelon, *args: Any, **named: Any) -> Any:
        return method(self._echelon.group, *args, **named)

    return cast("_Method", call)


class ProcessGroupEchelon(ProcessGroup):  # type: ignore[misc]  # torchft is untyped here
    """A process group for torchft's `Manager`, over shared memory and Gloo.

    If a member dies, the other members' operations raise PeerLostError, normally within 0.1 s, and
    `errored` returns this error. On one host, sums are computed in rank order, so the results are
    bitwise identical on all members. With `Options(reduction="rank_ordered")`, this also holds
    across hosts.

    Args:
        timeout: the timeout of `configure`, and of operations that do not specify a timeout.
        options: the options of the groups that `configure` creates.

    Example:
        >>> manager = torchft.Manager(  # doctest: +SKIP
        ...     pg=ProcessGroupEchelon(timeout=timedelta(seconds=30)), min_replica_size=1,
        ...     load_state_dict=load, state_dict=save)
    """

    def __init__(
        self, timeout: timedelta = timedelta(seconds=60), options: Options | None = None
    ) -> None:
        super().__init__(0, 1)
        self._echelon = Reconfigurable(seconds(timeout), options)

    def configure(
        self,
        store_addr: str,
        replica_id: str,  # noqa: ARG002 -- torchft's signature; the ranks say the same
        rank: int,
        world_size: int,
        quorum_id: int | None = None,
        group_rank: int | None = None,  # noqa: ARG002
        group_world_size: int | None = None,  # noqa: ARG002
        global_ranks: list[int] | None = None,
    ) -> None:
        """Leave the current group and join a new one; block until all its members have joined.

        Args:
            store_addr: the store, as "host:port/prefix"; every call needs a different prefix.
            rank: this process's rank within the group.
            world_size: the number of members.
            quorum_id: torchft's quorum number, which names the group in errors and records.
            global_ranks: the numbers that identify the members in errors and records. If torchft
                gives two members the same number, as it does if replica ids do not end in digits,
                the members are numbered 0 to world_size - 1 instead.

        Raises:
            ValueError: the address or the rank is malformed.
            StoreError: the store does not respond.
            CollectiveTimeoutError: some members did not join within the timeout.
            PeerLostError: a member died during the call.
            CollectiveError: `abort` was called during the call.
        """
        name = "replicas" if quorum_id is None else f"quorum_{quorum_id}"
        ranks = global_ranks or []
        if len(ranks) != world_size or len(set(ranks)) != world_size:
            ranks = list(range(world_size))
        self._echelon.configure(store_addr, name, rank, ranks)

    def errored(self) -> Exception | None:
        """Return the error that ended the group or prevented its creation, or None."""
        return self._echelon.error

    def abort(self) -> None:
        """Abort the current group on all its members, even while the group is being created.

        Operations and `configure` calls that are waiting raise CollectiveError within 1 s. The
        method can be called on any thread.
        """
        self._echelon.abort()

    def shutdown(self) -> None:
        """Leave the current group and release its resources within 2 s. Safe to call twice."""
        self._echelon.shutdown()

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of `configure` and of the group's later operations."""
        self._echelon.set_timeout(seconds(timeout))

    def rank(self) -> int:
        """Return this process's rank within the current group."""
        return self._echelon.rank

    def size(self) -> int:
        """Return the number of members of the current group."""
        return self._echelon.size

    getRank = rank  # noqa: N815 -- C++ looks these names up
    getSize = size  # noqa: N815

    def getBackendName(self) -> str:  # noqa: N802 -- torchft looks this name up
        """Return the backend's name."""
        return "torchft-echelon"

    def broadcast_one(self, tensor: Any, root: int) -> Any:
        """Copy the root's tensor into every rank's tensor."""
        options = BroadcastOptions()
        options.rootRank = root
        return self.broadcast([tensor], options)

    def __repr__(self) -> str:
        return f"ProcessGroupEchelon(rank {self.rank()} of {self.size()})"

    allreduce = _of_group(TorchGroup.allreduce)
    allreduce_coalesced = _of_group(TorchGroup.allreduce_coalesced)
    reduce = _of_group(TorchGroup.reduce)
    broadcast = _of_group(TorchGroup.broadcast)
    allgather = _of_group(TorchGroup.allgather)
    allgather_into_tensor_coalesced = _of_group(TorchGroup.allgather_into_tensor_coalesced)
    _allgather_base = _of_group(TorchGroup._allgather_base)
    reduce_scatter = _of_group(TorchGroup.reduce_scatter)
    reduce_scatter_tensor_coalesced = _of_group(TorchGroup.reduce_scatter_tensor_coalesced)
    _reduce_scatter_base = _of_group(TorchGroup._reduce_scatter_base)
    gather = _of_group(TorchGroup.gather)
    scatter = _of_group(TorchGroup.scatter)
    alltoall = _of_group(TorchGroup.alltoall)
    alltoall_base = _of_group(TorchGroup.alltoall_base)
    send = _of_group(TorchGroup.send)
    recv = _of_group(TorchGroup.recv)
    recv_anysource = _of_group(TorchGroup.recv_anysource)
    barrier = _of_group(TorchGroup.barrier)
