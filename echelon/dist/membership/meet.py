"""Exchange one value per member through the store: how every group begins."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

from echelon.dist.backends.interface import CHECK_EVERY_S, Members
from echelon.dist.errors import build
from echelon.dist.operation.operation import Operation
from echelon.errors import CollectiveTimeoutError, StoreTimeoutError
from echelon.store import PrefixStore


def gather(
    members: Members, store: PrefixStore, key: str, mine: Any, deadline_s: float
) -> list[Any]:
    """Exchange one value per member through the store.

    Who gives up first withdraws its arrival, so that the next to give up would miss it too: a note
    that outlives the withdrawal says who came at all.

    Raises:
        CollectiveTimeoutError: members did not come by `deadline_s`; names those that never did.
    """
    value = json.dumps(mine).encode()
    left = max(0.001, deadline_s - time.monotonic())
    try:
        store.set(f"{key}/came/{members.rank}", b"1")
        values = store.gather(key, members.rank, members.size, value, timeout=left)
    except StoreTimeoutError as err:
        late = [int(rank) for rank in err.missing]
        never = [rank for rank in late if not store.check([f"{key}/came/{rank}"])]
        missing = [members.ranks[rank] for rank in never or late]
        raise CollectiveTimeoutError(
            f"setting up group {members.name!r} ({members.size} ranks) after {left:.1f} s: "
            f"missing: {', '.join(map(str, missing))}. See stderr.log of those ranks",
            group=members.name,
            operation="init",
            ranks=missing,
        ) from err
    return [json.loads(text) for text in values]


def next_round(members: Members, store: PrefixStore, deadline_s: float) -> int:
    """Agree on the number of the world that these ranks are about to make.

    Every key of a world lies below its number, so a process that leaves and joins again never reads
    what an earlier world left in the store. The store keeps the count, not the ranks: a restarted
    process has forgotten how many worlds it was in. Rank 0 draws the number and all ranks receive
    it in one gather, which completes only when every rank is joining.

    Raises:
        CollectiveTimeoutError: members did not join by `deadline_s`; names them.
    """
    if members.size == 1:
        return 0
    drawn = store.add("worlds", 1) if members.rank == 0 else 0
    number = int(gather(members, store, "join", drawn, deadline_s)[0])
    store.delete_key(f"join/came/{members.rank}")  # the next round uses these keys again
    return number


def exchange(
    members: Members,
    store: PrefixStore,
    key: str,
    mine: str,
    deadline_s: float,
    check: Callable[[], None],
) -> list[str]:
    """Exchange one text per member through the store, with an eye on the members' lives.

    Args:
        key: used for this exchange only.
        check: raises if a member has died; called every `CHECK_EVERY_S`.

    Raises:
        CollectiveTimeoutError: members did not write by `deadline_s`; names them.
    """
    keys = [f"{key}/{rank}" for rank in range(members.size)]
    store.set(keys[members.rank], mine)
    while True:
        left_s = max(0.001, deadline_s - time.monotonic())
        try:
            store.wait(keys, timeout=min(CHECK_EVERY_S, left_s))
            return [text.decode() for text in store.multi_get(keys)]
        except StoreTimeoutError:
            check()
            if time.monotonic() >= deadline_s:
                late = [rank for rank, one in enumerate(keys) if not store.check([one])]
                raise build.timed_out(members, Operation("init", 0), late) from None
