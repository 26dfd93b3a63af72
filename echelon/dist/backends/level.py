"""Provide levels: the subgroups in which a two-level engine carries out its steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from echelon.dist.backends.host_engine import HostEngine
from echelon.dist.backends.interface import Engine, Members, Watch
from echelon.dist.operation.arrays import Flat
from echelon.dist.operation.operation import Operation, encode_call
from echelon.store.deadline import time_left_s


class LevelWatch:
    """A watch for a subgroup's engine, backed by the watch of an operation on the whole group."""

    __slots__ = ("_places", "_watch", "deadline_s")

    def __init__(self, watch: Watch, places: Sequence[int]) -> None:
        """Create the watch; `places` maps ranks of the subgroup to ranks of the whole group."""
        self._watch = watch
        self._places = places
        self.deadline_s = watch.deadline_s

    def check(self, needed: Callable[[], Sequence[int]] | None = None) -> None:
        """Raise an error if the operation must be aborted; see `interface.Watch.check`."""
        if needed is None:
            self._watch.check(None)
        else:
            self._watch.check(lambda: [self._places[rank] for rank in needed()])


class Level:
    """A subgroup at one level (within a host or between hosts), which numbers its own operations.

    Args:
        members: the members of the subgroup.
        places: the rank of each subgroup member in the whole group.
    """

    def __init__(self, members: Members, engine: Engine, places: Sequence[int]) -> None:
        self.members = members
        self.places = places
        self.engine = engine
        self._carry_out = engine.carry_out if isinstance(engine, HostEngine) else engine.execute
        self._sequence = 0

    def run(
        self,
        kind: str,
        source: Flat | None,
        target: Flat | None,
        like: Operation,
        watch: Watch,
        *,
        dtype: str = "",
        reduce_op: str = "",
        root: int = -1,
    ) -> None:
        """Carry out one step of the whole group's operation among this level's members.

        `like` is the whole group's operation; the step uses its dtype unless `dtype` is given.
        """
        shown = source if source is not None else target
        shape = None if shown is None else (len(shown),)
        dtype = dtype or like.dtype
        operation = Operation(
            kind=kind,
            sequence=self._sequence,
            dtype=dtype,
            reduce_op=reduce_op,
            root=root,
            source=source,
            target=target,
            shape=shape or (),
            timeout_s=time_left_s(watch.deadline_s),
            call=encode_call(kind, reduce_op, dtype, root, shape),
        )
        self._sequence += 1
        self._carry_out(operation, LevelWatch(watch, self.places))
