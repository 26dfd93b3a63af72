"""Exchange one value per member of a new group through the store."""

from __future__ import annotations

import json
import time
from typing import Any

from echelon.dist.backends.interface import Members
from echelon.errors import CollectiveTimeoutError, StoreTimeoutError
from echelon.store import PrefixStore
from echelon.store.base import Store
from echelon.store.deadline import time_left_s


def gather(
    members: Members, store: PrefixStore, key: str, mine: Any, deadline_s: float
) -> list[Any]:
    """Exchange one value per member through the store, under a key that can be reused.

    A rank that times out withdraws its arrival. Each rank also stores a separate mark of its
    arrival, which is not withdrawn, so that other ranks do not report the rank as missing.

    Raises:
        CollectiveTimeoutError: some members did not arrive by `deadline_s`; the error names those
            that never arrived or, if every member arrived at some time, those that withdrew.
    """
    value = json.dumps(mine).encode()
    left = time_left_s(deadline_s)
    try:
        store.set(f"{key}/came/{members.rank}", b"1")
        values = store.gather(key, members.rank, members.size, value, timeout=left)
    except StoreTimeoutError as err:
        late = [int(rank) for rank in err.missing]
        never = [rank for rank in late if not store.check([f"{key}/came/{rank}"])]
        raise _missing(members, never or late, left) from err
    return [json.loads(text) for text in values]


def next_round(members: Members, store: PrefixStore, deadline_s: float) -> int:
    """Agree on the number of the world that these ranks are about to create.

    Every key of a world starts with the world's number, so a process that rejoins never reads keys
    from an earlier world. The numbers are counted in the store, because a restarted process does
    not know the last number. Rank 0 takes the next number and passes it to all ranks in one gather.

    Raises:
        CollectiveTimeoutError: some members did not join by `deadline_s`; the error names them.
    """
    if members.size == 1:
        return 0
    drawn = store.add("worlds", 1) if members.rank == 0 else 0
    number = int(gather(members, store, "join", drawn, deadline_s)[0])
    store.delete_key(f"join/came/{members.rank}")  # the next round uses these keys again
    return number


def latest_round(store: PrefixStore) -> int:
    """Return the number of the newest world, for a process that joins this world."""
    return store.add("worlds", 0)


def exchange(
    members: Members, store: PrefixStore, key: str, mine: Any, deadline_s: float
) -> list[Any]:
    """Exchange one value per member through the store while watching for members that die.

    The last rank to arrive sets a gate key, so that each rank waits for only one key, regardless of
    the number of ranks.

    Args:
        key: a key used only for this exchange.

    Raises:
        CollectiveTimeoutError: some members did not arrive by `deadline_s`; the error names them.
        PeerLostError: a member died; `members.check` detects a death within about a second.
    """
    began_s = time.monotonic()
    names = [f"{key}/{rank}" for rank in range(members.size)]
    arrive(members, store, key, mine)
    left_s = max(0.001, deadline_s - began_s)
    try:
        store.wait([f"{key}/gate"], timeout=left_s, check=members.check)
    except StoreTimeoutError as err:
        members.check()
        late = [rank for rank, name in enumerate(names) if not store.check([name])]
        if late:  # else all have arrived, and this rank stood still past its deadline
            raise _missing(members, late, left_s) from err
    return [json.loads(text) for text in store.multi_get(names)]


def arrive(members: Members, store: Store, key: str, mine: Any) -> None:
    """Publish this rank's value for an `exchange`, without waiting for other ranks."""
    store.set(f"{key}/{members.rank}", json.dumps(mine))
    if store.add(f"{key}/arrived", 1) == members.size:
        store.set(f"{key}/gate", b"1")


def _missing(members: Members, late: list[int], after_s: float) -> CollectiveTimeoutError:
    ranks = [members.ranks[rank] for rank in late]
    return CollectiveTimeoutError(
        f"group {members.name!r} ({members.size} ranks) was not set up within {after_s:.1f} s "
        f"(missing: {', '.join(map(str, ranks))}). See the stderr.log of each missing rank",
        group=members.name,
        operation="init",
        ranks=ranks,
    )
