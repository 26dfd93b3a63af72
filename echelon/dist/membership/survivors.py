"""Find out who is gone, for backends whose library only says that something broke.

Where processes share a host, their deaths are seen directly. Elsewhere the survivors help each
other through the store: the first that knows leaves a verdict; who knows nothing reads it, looks
who left in order, and at last calls the roll: all that still live come at once, who does not is the
one to name.
"""

from __future__ import annotations

import contextlib
import json
import time

from echelon.dist.backends.interface import Members
from echelon.dist.errors import build
from echelon.dist.membership.host import process_identity, processes_here
from echelon.dist.membership.meet import gather
from echelon.dist.membership.peers import Peers
from echelon.dist.operation.operation import Operation
from echelon.errors import (
    CollectiveError,
    CollectiveTimeoutError,
    PeerLostError,
    StoreError,
    StoreTimeoutError,
)
from echelon.store import PrefixStore

_ROLL_CALL_S = 2.0
_HEARSAY_S = 0.5
_SOON_S = 0.25  # a busy machine takes longer than an idle one's millisecond to answer
_NOW_S = 0.01
_ASK_EVERY_S = 2.0


class Survivors:
    """The other members of a group, as far as one can tell from outside the library."""

    def __init__(
        self, members: Members, store: PrefixStore, verdicts: PrefixStore, deadline_s: float
    ) -> None:
        """Learn where the others run.

        Args:
            verdicts: where ranks leave whom they blame; groups that fail together share it.
            deadline_s: on the monotonic clock.

        Raises:
            CollectiveTimeoutError: members did not come.
        """
        self._members = members
        self._store = store
        self._verdicts = verdicts
        self._others = [rank for rank in range(members.size) if rank != members.rank]
        self._told = False
        self._ask_at_s = time.monotonic() + _ASK_EVERY_S
        facts = gather(members, store, "processes", process_identity(), deadline_s)
        self._peers = Peers(processes_here(facts, members.rank))

    def look(self, operation: Operation) -> None:
        """Raise if a process of this host has died, or others have given up for some time.

        The library should say the latter at once, but Gloo sometimes does not wake who waits.
        """
        dead = self._peers.dead(self._others)
        if dead:
            raise self._verdict(operation, _SOON_S) or build.peer_lost(
                self._members, operation, dead
            )
        if time.monotonic() >= self._ask_at_s:
            self._ask_at_s = time.monotonic() + _ASK_EVERY_S
            said = self._verdict(operation, _NOW_S)
            if said is not None:
                raise said

    def tell(self, error: CollectiveError) -> None:
        """Leave whom this rank blames for those that cannot see it; the first word counts."""
        self._told = True
        if isinstance(error, CollectiveTimeoutError | PeerLostError) and error.ranks:
            lost = isinstance(error, PeerLostError)
            text = json.dumps({"lost": lost, "ranks": list(error.ranks)})
            with contextlib.suppress(StoreError):
                self._verdicts.compare_set("verdict", "", text)

    def give_up(self) -> None:
        """Say that this rank has ended the group, if it was not others who made it."""
        if self._told:
            return
        text = json.dumps({"lost": True, "ranks": [self._members.ranks[self._members.rank]]})
        with contextlib.suppress(StoreError):
            self._verdicts.compare_set("verdict", "", text)
        self.leave()

    def leave(self) -> None:
        """Say that this rank goes on its own account; not if others made it give up."""
        if not self._told:
            with contextlib.suppress(StoreError):
                self._store.set(f"left/{self._members.rank}", b"1")

    def find(self, operation: Operation, timed_out: bool) -> CollectiveError:
        """Name who is gone: dead here, blamed by others, left in order, or absent at roll call.

        A connection can break before its process counts as dead, so the dead are looked for again;
        and who has given up may have exited since, so what others have said comes before that.
        """
        with contextlib.suppress(StoreError):
            dead = self._peers.dead(self._others)
            said = self._verdict(operation, _SOON_S if dead else _HEARSAY_S)
            if said is not None:
                return said
            if not dead:
                left = [r for r in self._others if self._store.check([f"left/{r}"])]
                dead = self._peers.dead(self._others) or left
            if dead:
                return build.peer_lost(self._members, operation, dead)
            missing = self._call_roll()
            dead = self._peers.dead(self._others)
            said = self._verdict(operation, _SOON_S)
            if said is not None:
                return said
            make = build.timed_out if timed_out and not dead else build.peer_lost
            return make(self._members, operation, dead or missing)
        make = build.timed_out if timed_out else build.peer_lost
        return make(self._members, operation, [])

    def close(self) -> None:
        """Forget the processes."""
        self._peers.close()

    def _verdict(self, operation: Operation, wait_s: float) -> CollectiveError | None:
        """Return what a rank that knows better has said, waiting for it a moment."""
        try:
            said = json.loads(self._verdicts.get("verdict", timeout=wait_s))
        except (StoreError, ValueError):
            return None
        places = {rank: place for place, rank in enumerate(self._members.ranks)}
        ranks = [places[rank] for rank in said["ranks"] if rank in places]
        make = build.peer_lost if said["lost"] else build.timed_out
        error = make(self._members, operation, ranks)
        error.ranks = tuple(said["ranks"])  # some may be outside this group: they broke another
        return error

    def _call_roll(self) -> list[int]:
        """Return the others that do not come to the store within a moment."""
        try:
            self._store.gather(
                "roll", self._members.rank, self._members.size, b"", timeout=_ROLL_CALL_S
            )
        except StoreTimeoutError as err:
            return [int(rank) for rank in err.missing if int(rank) != self._members.rank]
        return []
