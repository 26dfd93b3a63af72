"""Create the echelon group behind a torch group.

Torch passes its store, a rank and a size to the backend. The members join through that store, so a
second rendezvous is not needed. The same program can also call `echelon.dist.init`, which creates a
separate world.
"""

from __future__ import annotations

import math
import time
from typing import Any

import echelon.recorder.current as black_box
from echelon.dist.group import ProcessGroup
from echelon.dist.make_group import GroupMaker
from echelon.dist.membership import clocks
from echelon.dist.options import Options
from echelon.dist.torch_backend.group import TorchGroup
from echelon.dist.torch_backend.store import Meeting
from echelon.errors import CollectiveTimeoutError, StoreError, StoreTimeoutError
from echelon.store import PrefixStore
from echelon.store.deadline import time_left_s

_CLOCKS_S = 30.0
_NAME_CHARS = 8  # of torch's hashed group names
_LONGEST_TIMEOUT_S = 1e9
_NAMELESS = ("", "undefined")

_world_options = Options()


def create(torch_options: Any, group_options: Any) -> TorchGroup:
    """Create the backend of a torch group; block until all members have called this function.

    Args:
        torch_options: torch's `_DistributedBackendOptions`.
        group_options: the user's `pg_options`: echelon's `Options`, or None for the options of the
            default group.

    Raises:
        TypeError: `pg_options` has the wrong type.
        CollectiveTimeoutError: some members did not join within the group's timeout.
    """
    global _world_options
    if group_options is not None and not isinstance(group_options, Options):
        raise TypeError(
            "pg_options of backend 'echelon' must be echelon.dist.Options(...), "
            f"got {type(group_options).__name__}"
        )
    is_world = not torch_options.global_ranks_in_group
    if is_world:
        _world_options = group_options or Options()
    maker = Maker(torch_options, group_options or _world_options, is_world)
    return TorchGroup(maker, torch_options.store)


class Maker:
    """A factory for the echelon group behind one torch group."""

    def __init__(self, torch_options: Any, options: Options, is_world: bool) -> None:
        self.rank = int(torch_options.group_rank)
        self.size = int(torch_options.group_size)
        self.ranks = tuple(torch_options.global_ranks_in_group) or tuple(range(self.size))
        self.timeout_s = seconds(torch_options.timeout)
        self.is_world = is_world
        self._options = options
        self._torch_name = str(torch_options.group_id)
        self._torch_store = torch_options.store
        self._meeting: Meeting | None = None

    def make(self, description: str) -> ProcessGroup:
        """Create the group; block until all members have called this method.

        Args:
            description: torch's `group_desc`, such as "mesh_dp", which names the group in verdicts.
        """
        deadline_s = time.monotonic() + self.timeout_s
        name = "world" if self.is_world else description
        if name in _NAMELESS:
            name = _short(self._torch_name)
        meeting = self._meet(name)
        try:
            group = self._make(name, meeting.store, deadline_s)
        except BaseException:
            meeting.withdraw()
            raise
        self._meeting = meeting
        return group

    def _make(self, name: str, store: PrefixStore, deadline_s: float) -> ProcessGroup:
        group = GroupMaker(self.ranks[self.rank], store, None, self._options).make(
            self.ranks, name, store, time_left_s(deadline_s)
        )
        group.timeout_s = self.timeout_s
        if self.is_world:
            self._introduce(store, one_host=group.backend == "shm")
        return group

    def close(self) -> None:
        """Disconnect from the store. Call this when the group is closed."""
        if self._meeting is not None:
            self._meeting.close()

    def _meet(self, name: str) -> Meeting:
        try:
            return Meeting(self._torch_store, self.rank, self.timeout_s)
        except StoreTimeoutError as err:
            raise CollectiveTimeoutError(
                f"group {name!r} ({self.size} ranks) was not set up within {self.timeout_s:.1f} s "
                f"(missing: {self.ranks[0]}). See the missing rank's stderr.log",
                group=name,
                operation="init",
                ranks=self.ranks[:1],
            ) from err

    def _introduce(self, store: PrefixStore, *, one_host: bool) -> None:
        """Record this process's rank in the black box, as `echelon.dist.init` does."""
        black_box.record_as_rank(self.rank, self.size)
        recorder = black_box.current()
        if recorder is None:
            return
        mine = (recorder.identity.world_size, recorder.identity.rank)
        if mine != (self.size, self.rank):
            recorder.identify(world_size=self.size, rank=self.rank)
        if not one_host:
            offset = _offset(store, self.rank, self.size, min(self.timeout_s, _CLOCKS_S))
            if offset is not None:
                recorder.identify(clock_offset_ns=offset.offset_ns, clock_error_ns=offset.error_ns)
        recorder.mark_initialized()


def seconds(timeout: Any) -> float:
    """Convert torch's timeout to seconds, limited to 1e9; replace an invalid timeout with 0.001."""
    value = float(timeout.total_seconds())
    return min(value, _LONGEST_TIMEOUT_S) if value > 0 and math.isfinite(value) else 0.001


def _offset(store: PrefixStore, rank: int, size: int, timeout_s: float) -> Any:
    try:
        return clocks.agree(PrefixStore("clocks", store), rank, size, timeout_s)
    except StoreError:
        return None  # records then line up less well; that must not stop training


def _short(name: str) -> str:
    return f"group_{name if len(name) <= _NAME_CHARS else name[:_NAME_CHARS]}"
