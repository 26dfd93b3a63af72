"""Track the process groups of a torch program and the numbers of their operations."""

from __future__ import annotations

import itertools
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

from echelon.recorder.write.recorder import Recorder

_WORLD = "default_pg"  # torch's description of its first group
_UNNAMED = ("", "undefined")


class Group:
    """A process group, with its reference in the ring and its sequence counters.

    Collectives are numbered per group, and messages per peer and direction.
    """

    __slots__ = ("_messages", "next_collective", "ranks", "reference")

    def __init__(self, reference: int, ranks: tuple[int, ...]) -> None:
        self.reference = reference
        self.ranks = ranks
        self.next_collective: Callable[[], int] = itertools.count().__next__
        self._messages: dict[tuple[str, int], Iterator[int]] = defaultdict(itertools.count)

    def next_message(self, operation: str, peer: int) -> int:
        """Return the number of the next message to or from a peer, or -1 if the peer is unknown."""
        return -1 if peer < 0 else next(self._messages[operation, peer])

    def global_rank(self, rank: int) -> int:
        """Return a group rank's global rank, or -1 if the group has no such rank."""
        return self.ranks[rank] if 0 <= rank < len(self.ranks) else -1


class Groups:
    """The process groups of this process, keyed by torch's unique group names."""

    def __init__(self) -> None:
        self._known: dict[str, Group] = {}

    def forget(self, name: str) -> None:
        """Drop a group, so that its name can be reused."""
        self._known.pop(name, None)

    def of(self, process_group: Any, recorder: Recorder) -> Group:
        """Return the entry of a process group, adding one if the group is new."""
        name = process_group.group_name
        known = self._known.get(name)
        if known is None:
            ranks = tuple(_distributed().get_process_group_ranks(process_group))
            title = _title(name, process_group.group_desc, ranks)
            known = self._known[name] = Group(recorder.new_group(title, ranks), ranks)
        return known


def _title(name: str, description: str, ranks: tuple[int, ...]) -> str:
    """Return a readable name for a group, which is the same on all members."""
    if description == _WORLD:
        return "world"
    if description in _UNNAMED:
        return f"group {name}" if len(name) <= 8 else f"group of {len(ranks)}"
    return description


def _distributed() -> Any:
    return sys.modules["torch.distributed.distributed_c10d"]
