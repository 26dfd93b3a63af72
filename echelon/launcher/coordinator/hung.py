"""End ranks that hang, so that the other ranks continue without them (`--on-stall replace`).

A rank that was ended for its hang is a loss like any other: `Losses` decides whether the attempt
survives it, and how. So a rank is ended only if `Losses` would survive its death, and if its
verdict leaves no doubt: it is `certain`, and its cause is the hang of a process, which neither the
other ranks nor their repetition of the step share. All other stalls are treated as under
`--on-stall restart`.

A rank may survive SIGKILL for as long as the kernel waits for a device. Then nothing is known about
what the rank still holds, and the attempt ends, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from echelon.launcher.control import messages as m
from echelon.launcher.coordinator.losses import Losses, named
from echelon.launcher.coordinator.policy.failure import Failure
from echelon.launcher.coordinator.policy.table import row_for
from echelon.launcher.coordinator.world import World
from echelon.launcher.job.report import Incident

DIES_S = 30.0  # from the order to kill a rank to its end, on a busy node
_CAUSES = ("frozen_process", "gil_hang", "host_hang", "device_stuck")


class HungRanks:
    """The ranks of the current attempt that are ended because they hang.

    Args:
        losses: decides which losses the attempt survives.
        send: sends a command to a node.
        say: prints a line.
    """

    def __init__(
        self, losses: Losses, send: Callable[[str, m.Command], None], say: Callable[[str], None]
    ) -> None:
        self._losses = losses
        self._send = send
        self._say = say
        self.clear()

    def clear(self) -> None:
        """Forget all ranks, now that their attempt has ended."""
        self._former: list[Failure] = []  # hangs of this attempt that ranks were ended for
        self._incidents: dict[int, Incident] = {}
        self._causes: dict[int, str] = {}
        self._world: World | None = None
        self._dying: set[int] = set()
        self._until_s = float("inf")

    def end(self, world: World, failure: Failure, incident: Incident, now_s: float) -> str:
        """Have the culprits of a stall killed; return why they are not, or "" if they are."""
        ranks = failure.culprit_ranks
        why_not = self._why_not(failure) or self._losses.why_not_without(world, ranks)
        if why_not:
            return why_not
        self._former.append(failure)
        for rank in ranks:
            self._causes[rank], self._incidents[rank] = failure.cause, incident
        self._world = world
        self._dying |= set(ranks)
        self._until_s = now_s + DIES_S
        self._say(f"{named(ranks)} hang{'s' if len(ranks) == 1 else ''}: {failure.cause}; ending")
        for node in failure.nodes:
            own = [rank for rank in ranks if rank in world.nodes[node]]
            self._send(node, m.KillRanks(attempt=world.number, ranks=own))
        return ""

    def _why_not(self, failure: Failure) -> str:
        if failure.cause not in _CAUSES:
            return f"the cause is {failure.cause}, not the hang of a process"
        if not failure.is_certain:
            return f"the verdict on {failure.cause} is not certain"
        if not failure.culprit_ranks:
            return f"the verdict on {failure.cause} names no rank"
        limit = row_for(failure).repeats
        if limit is not None and sum(failure.repeats(one) for one in self._former) >= limit:
            return f"ranks keep hanging at the same place ({failure.site})"
        return ""

    def cause_of(self, rank: int) -> str:
        """Return why a rank was ended, or "" if it was not ended for a hang."""
        return self._causes.get(rank, "")

    def note_ended(self, world: World, rank: int, *, is_survived: bool, now_ns: int) -> None:
        """Record that a rank ended; its stall is over if the other ranks continue."""
        self._dying.discard(rank)
        if not self._dying:
            self._until_s = float("inf")
        incident = self._incidents.get(rank)
        if incident is not None and is_survived:
            incident.recovered = True
            world.rule.begin_again(now_ns)

    def deadline_s(self) -> float:
        """Return the time by which `undead` must be called."""
        return self._until_s

    def undead(self, now_s: float) -> tuple[Sequence[int], World] | None:
        """Return the ranks that have survived SIGKILL for too long, once, with their attempt."""
        if self._world is None or now_s < self._until_s:
            return None
        found = sorted(self._dying)
        self._dying.clear()
        self._until_s = float("inf")
        return found, self._world
