"""Kill ranks that hang, so that the other ranks can continue without them (`--on-stall replace`).

A hung rank is killed only if all of these conditions hold:

- `Losses` would let the attempt continue without the rank.
- The verdict is `certain`, and its cause is a hung process.
- If the cause is `host_hang` or `gil_hang`, the process used no CPU time while it was examined, so
  it cannot be computing.
- The number of earlier kills for the same hang in this attempt is below the limit in the policy
  table.

Any other stall is handled as under `--on-stall restart`.

A rank can survive SIGKILL while the kernel waits for a device. If the rank does not exit in time,
the attempt ends.
"""

from __future__ import annotations

from collections.abc import Callable

from echelon.launcher.control import messages as m
from echelon.launcher.coordinator.loss.losses import Losses, named
from echelon.launcher.coordinator.policy.failure import Failure
from echelon.launcher.coordinator.policy.table import row_for
from echelon.launcher.coordinator.world import World
from echelon.launcher.job.report import Incident

DIES_S = 30.0  # from the order to kill a rank to its end, on a busy node
OWN_HANGS = ("gil_hang", "host_hang")  # in the rank's own code, which may be computing
_CAUSES = ("frozen_process", *OWN_HANGS)


class HungRanks:
    """The ranks of the current attempt that are killed because they hang.

    Args:
        losses: decides which losses the attempt survives.
        send: sends a command to a node.
        say: prints a line for the user.
        dies_s: how long to wait for a killed rank to exit, in seconds.
    """

    def __init__(
        self,
        losses: Losses,
        send: Callable[[str, m.Command], None],
        say: Callable[[str], None],
        dies_s: float = DIES_S,
    ) -> None:
        self._losses = losses
        self._send = send
        self._say = say
        self._dies_s = dies_s
        self.clear()

    def clear(self) -> None:
        """Forget all ranks, now that their attempt has ended."""
        self._former: list[Failure] = []  # hangs of this attempt that ranks were ended for
        self._incidents: dict[int, Incident] = {}
        self._causes: dict[int, str] = {}
        self._world: World | None = None
        self._dying: set[int] = set()
        self._until_s = float("inf")

    @property
    def is_killing(self) -> bool:
        """True while any rank that is being killed is still running."""
        return bool(self._dying)

    def end(self, world: World, failure: Failure, incident: Incident, now_s: float) -> str:
        """Send commands to kill a stall's culprits, and return "".

        If the culprits must not be killed, send nothing and return the reason.
        """
        ranks = failure.culprit_ranks
        why_not = self._why_not(failure) or self._losses.why_not_without(world, ranks)
        if why_not:
            return why_not
        self._former.append(failure)
        for rank in ranks:
            self._causes[rank], self._incidents[rank] = failure.cause, incident
        self._world = world
        self._dying |= set(ranks)
        self._until_s = now_s + self._dies_s
        hang, them = ("hangs", "it") if len(ranks) == 1 else ("hang", "them")
        self._say(f"{named(ranks)} {hang} ({failure.cause}); ending {them}")
        for node in failure.nodes:
            own = [rank for rank in ranks if rank in world.nodes[node]]
            if own:
                self._send(node, m.KillRanks(attempt=world.number, ranks=own))
        return ""

    def _why_not(self, failure: Failure) -> str:
        if failure.cause not in _CAUSES:
            return f"the cause is {failure.cause}, not the hang of a process"
        if not failure.is_certain:
            return f"the verdict on {failure.cause} is not certain"
        if not failure.culprit_ranks:
            return f"the verdict on {failure.cause} names no rank"
        busy = computing(failure)
        if busy:
            verb = "is" if len(busy) == 1 else "are"
            return f"{named(busy)} {verb} computing, or may be, and may finish that"
        limit = row_for(failure).repeats
        if limit is not None and sum(failure.repeats(one) for one in self._former) >= limit:
            at = f" ({failure.site})" if failure.site else ""
            return f"ranks keep hanging at the same place{at}"
        return ""

    def cause_of(self, rank: int) -> str:
        """Return the cause of the hang for which a rank was killed; "" if it was not killed."""
        return self._causes.get(rank, "")

    def note_ended(self, rank: int, *, is_survived: bool) -> None:
        """Record that a rank ended. A stall counts as resolved once all its culprits have ended.

        Args:
            is_survived: whether the other ranks continue without this rank.
        """
        self._dying.discard(rank)
        if not self._dying:
            self._until_s = float("inf")
        incident = self._incidents.get(rank)
        if incident is None or not is_survived:
            return
        if not any(self._incidents[one] is incident for one in self._dying):
            incident.recovered = incident.is_survived = True

    def forget(self, rank: int) -> None:
        """Forget why a rank's process was killed, because a new process now runs the rank."""
        self._causes.pop(rank, None)
        self._incidents.pop(rank, None)

    def deadline_s(self) -> float:
        """Return the time by which `undead` must be called."""
        return self._until_s

    def undead(self, now_s: float) -> tuple[str, World] | None:
        """If ranks have survived SIGKILL, return an error text and their world; otherwise None.

        Each case is reported only once.
        """
        if self._world is None or now_s < self._until_s:
            return None
        found = named(sorted(self._dying))
        self._dying.clear()
        self._until_s = float("inf")
        return f"{found} survived SIGKILL for {self._dies_s:g} s; the attempt ends", self._world


def computing(failure: Failure) -> tuple[int, ...]:
    """Return the culprits that might still be computing; () if the failure is not a hang."""
    if failure.cause not in OWN_HANGS:
        return ()
    return tuple(rank for rank in failure.culprit_ranks if rank not in failure.idle_ranks)
