"""Align the hosts' clocks once, at `init`, by measuring each clock's offset from rank 0's clock.

Ranks that share rank 0's clock (on a single host, all ranks) do not need an offset. On every other
host, one rank repeatedly asks rank 0 for the time, through the store's queues, and passes the
offset to the other ranks on its host. Rank 0 computes how many requests to expect, and stops after
the last request.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable

from echelon.host.identity import clock_id
from echelon.recorder.clock import NUM_ROUNDS, ClockOffset, measure_offset
from echelon.store import PrefixStore


def agree(
    store: PrefixStore,
    rank: int,
    world_size: int,
    timeout_s: float,
    *,
    my_clock: str | None = None,
    now: Callable[[], int] = time.monotonic_ns,
) -> ClockOffset:
    """Return the offset of this rank's clock from rank 0's clock. All ranks must call `agree`.

    Args:
        timeout_s: the timeout of each wait for another rank.
        my_clock: the ID of this rank's clock; None means this process's own clock.
        now: a function that returns the time on this rank's clock, in ns.

    Raises:
        StoreTimeoutError: another rank did not join or answer in time.
    """
    name = clock_id() if my_clock is None else my_clock
    clocks = [text.decode() for text in store.gather("clock", rank, world_size, name, timeout_s)]
    asking = sorted({clocks.index(clock) for clock in set(clocks) if clock != clocks[0]})
    if rank == 0:
        _answer(store, len(asking) * NUM_ROUNDS, timeout_s, now)
    if not name or name == clocks[0]:
        return ClockOffset(0, 0 if name else -1)
    key = f"offset/{name}"
    if rank not in asking:
        offset_ns, error_ns = json.loads(store.get(key, timeout_s))
        return ClockOffset(int(offset_ns), int(error_ns))
    found = measure_offset(lambda: _ask(store, rank, timeout_s), now=now)
    store.set(key, json.dumps([found.offset_ns, found.error_ns]))
    return found


def _ask(store: PrefixStore, rank: int, timeout_s: float) -> int:
    store.queue_push("ask", str(rank))
    return int(store.queue_pop(f"answer/{rank}", timeout=timeout_s))


def _answer(
    store: PrefixStore, num_questions: int, timeout_s: float, now: Callable[[], int]
) -> None:
    for _ in range(num_questions):
        rank = store.queue_pop("ask", timeout=timeout_s).decode()
        store.queue_push(f"answer/{rank}", str(now()))
