"""Read what the ranks of the current attempt report about themselves.

Ranks on the hosting node report through files. The reports of ranks on other nodes arrive in
network messages from those nodes.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Mapping, Sequence

from echelon.errors import LaunchError
from echelon.launcher.coordinator.gathering.meeting import MeetingPlace
from echelon.launcher.coordinator.world import World
from echelon.launcher.job.rundir import RunDirectory
from echelon.launcher.node.standings import of_row
from echelon.recorder.continuation import Standing, State, begun_key, read_standing

Known = Mapping[int, Standing]  # the reports of the ranks that have reported


class Reports:
    """The reports of the current attempt's ranks.

    Args:
        own_node: the name of this node.
        meeting: the job's store, in which a rank sets a key once it can continue after a loss.
    """

    def __init__(self, directory: RunDirectory, own_node: str, meeting: MeetingPlace) -> None:
        self._meeting = meeting
        self._directory = directory
        self._own_node = own_node
        self._remote: dict[int, Standing] = {}  # of ranks on other nodes

    def clear(self) -> None:
        """Forget all reports, because a new attempt is beginning."""
        self._remote.clear()

    def take(self, rows: Iterable[Sequence[int]]) -> None:
        """Store a report that a node other than the hosting node sent about its own ranks."""
        self._remote.update(of_row(row) for row in rows)

    def forget(self, rank: int) -> None:
        """Forget what a lost rank reported, because another process is about to replace it."""
        self._remote.pop(rank, None)

    def ask_store(self, world: World, ranks: Iterable[int]) -> None:
        """Query the store about ranks on other nodes whose reports have not arrived."""
        known = {*self._remote, *world.nodes.get(self._own_node, ())}
        asked = [rank for rank in ranks if rank not in known]
        if not asked or self._meeting.how_it_died():
            return
        with contextlib.suppress(LaunchError):
            has_begun = self._meeting.has([begun_key(rank) for rank in asked])
            for rank in itertools.compress(asked, has_begun):
                self._remote[rank] = Standing(state=State.PROTECTED)

    def read(self, world: World) -> dict[int, Standing]:
        """Return the newest report of each rank that has reported."""
        found = dict(self._remote)
        for rank in world.nodes.get(self._own_node, ()):
            standing = read_standing(self._directory.rank_dir(rank, world.number))
            if standing is not None:
                found[rank] = standing
        return found

    def ready_there_ns(self) -> dict[int, int]:
        """Return when each rank on a remote node became ready, by that node's monotonic clock."""
        ready = ((rank, one.ready_there_ns) for rank, one in self._remote.items())
        return {rank: ns for rank, ns in ready if ns}


def is_joining(known: Known, rank: int) -> bool:
    """Return whether a rank has reported that it is joining and has no training state yet."""
    return rank in known and known[rank].state is State.JOINING


def are_finishing(known: Known) -> bool:
    """Return whether any rank has finished all its steps.

    If so, the other ranks are about to finish.
    """
    return any(one.state is State.DONE for one in known.values())
