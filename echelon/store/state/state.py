"""Manage the contents of a store and its waiters, without I/O, clocks or threads.

`StoreState` either answers a request immediately or stores a `Waiter`. Satisfied waiters are
collected in `woken`, and the server's loop or the `MemoryStore` delivers the answers. A member's
waits and reserved items belong to an `owner` token. `forget(owner)` withdraws all of them.

[Note: items promised to a waiter] torch implements a blocking queue_pop as WAIT followed by
QUEUE_POP. The server cannot distinguish this WAIT from one that precedes a get. If a push woke
every waiter, only one of them would find an item. Therefore a push wakes only one waiter that might
be about to pop (`Wants.CLAIM`), and reserves the item until the waiter's owner sends its next
command. If this command is a pop, the owner gets the item. If the owner sends another command, dies
or stays silent, the item is offered to the next waiter.
"""

from __future__ import annotations

import builtins
import sys
from collections import deque
from collections.abc import Callable, Hashable, Iterable

from echelon.store.state.waiters import MAX_WORLD_SIZE, Round, RoundStory, Waiter, Wants

INT64_MIN, INT64_MAX = -(1 << 63), (1 << 63) - 1


class StoreState:
    """The keys, queues, rounds and waiters of a store.

    Args:
        max_keys: the limit on the number of keys and queues. An operation that would exceed the
            limit raises ValueError and changes nothing.

    Attributes:
        values: the value of each key.
        queues: the queues that are not empty.
        promised_to: the queue of each reserved item, keyed by the item's owner.
        woken: the satisfied waiters whose answers have not been delivered.
        waiting: the waiters for each key, in order of arrival.
        rounds: the open barriers and gathers.
        present_by: the owner of each presence key.
        watched: the keys whose changes are reported.
        on_change: a function that is called when a watched key changes, with the key and its new
            value (None if the key was deleted).
    """

    def __init__(self, max_keys: int | None = None) -> None:
        self._max_keys = sys.maxsize if max_keys is None else max_keys
        self.values: dict[bytes, bytes] = {}
        self.queues: dict[bytes, deque[bytes]] = {}
        self.woken: list[Waiter] = []
        self.watched: set[bytes] = set()
        self.on_change: Callable[[bytes, bytes | None], None] | None = None
        self.waiting: dict[bytes, dict[Waiter, None]] = {}
        self.rounds: dict[bytes, Round] = {}
        self._waiters_of: dict[Hashable, dict[Waiter, None]] = {}
        self.promised_to: dict[Hashable, bytes] = {}
        self._promises: dict[bytes, int] = {}
        self.present_by: dict[bytes, Hashable] = {}

    # Keys.

    def set(self, key: bytes, value: bytes) -> None:
        """Store a value and wake the waiters for the key."""
        if key not in self.values:
            self._demand_room(1)
        self.values[key] = value
        if key in self.waiting:
            self._wake_key(key)
        if self.present_by:
            self.present_by.pop(key, None)
        if self.watched:
            self._tell(key, value)

    def get(self, key: bytes) -> bytes | None:
        """Return the value of a key, or None if the key is missing."""
        return self.values.get(key)

    def add(self, key: bytes, amount: int) -> int:
        """Add to a decimal counter and return the new value. A missing counter counts as 0.

        Raises:
            ValueError: the old or the new value is not a 64-bit integer.
        """
        total = self.sum_with(key, amount)
        self.set(key, b"%d" % total)
        return total

    def sum_with(self, key: bytes, amount: int) -> int:
        """Return the value that `add` would store, without changing the counter."""
        held = self.values.get(key, b"0")
        try:
            total = int(held) + amount
        except ValueError:
            raise ValueError(
                f"key {show_key(key)} contains {held[:40]!r}, which is not an integer"
            ) from None
        if not INT64_MIN <= total <= INT64_MAX:
            raise ValueError(f"the value of key {show_key(key)} would not fit in 64 bits: {total}")
        return total

    def append(self, key: bytes, value: bytes) -> None:
        """Append to the value of a key. A missing key is treated as empty."""
        self.set(key, self.values.get(key, b"") + value)

    def compare_set(self, key: bytes, expected: bytes, desired: bytes) -> bytes:
        """Store `desired` if the value is `expected`; an empty `expected` matches a missing key.

        Returns the value that the key has afterwards, or `expected` if the key is still missing.
        """
        held = self.values.get(key)
        if held is None and expected:
            return expected
        if held is None or held == expected:
            self.set(key, desired)
            return desired
        return held

    def delete(self, key: bytes) -> bool:
        """Remove a key and the queue of the same name; return whether either existed."""
        queue = self.queues.pop(key, None)
        value = self.values.pop(key, None)
        self.present_by.pop(key, None)
        if value is not None and self.watched:
            self._tell(key, None)
        return queue is not None or value is not None

    def set_many(self, pairs: Iterable[tuple[bytes, bytes]]) -> None:
        """Store several values as a single change, then wake the waiters."""
        found = dict(pairs)
        if len(self.values) + len(self.queues) + len(found) > self._max_keys:
            self._demand_room(len(found.keys() - self.values.keys()))
        self.values.update(found)
        followed = found.keys() & self.waiting.keys()
        if self.present_by or self.watched:
            followed |= found.keys() & (self.present_by.keys() | self.watched)
        for key in [key for key in found if key in followed] if followed else ():
            self.set(key, found[key])

    def _demand_room(self, num_keys: int) -> None:
        if len(self.values) + len(self.queues) + num_keys > self._max_keys:
            raise ValueError(f"the store cannot hold more than {self._max_keys} keys")

    def is_present(self, key: bytes) -> bool:
        """Return whether the key has a value or names a non-empty queue."""
        return key in self.values or key in self.queues

    # Queues.

    def push(self, key: bytes, item: bytes) -> None:
        """Append an item to a queue, or hand it to a waiting caller."""
        if key not in self.queues:
            self._demand_room(1)
        self.queues.setdefault(key, deque()).append(item)
        self._serve_queue(key)

    def pop(self, key: bytes, owner: Hashable) -> tuple[int, bytes]:
        """Take the oldest free item from a queue; return the number of free items and the item.

        The number includes the item taken, and is 0 if no item is free. Items promised to other
        owners are not free (see the note in the module docstring).
        """
        if self.promised_to.get(owner) == key:
            self._drop_promise(owner)
        available = self._free_items(key)
        return (available, self._take(key)) if available > 0 else (0, b"")

    def queue_length(self, key: bytes) -> int:
        """Return the number of items in a queue."""
        queue = self.queues.get(key)
        return len(queue) if queue else 0

    def release_promise(self, owner: Hashable) -> None:
        """Offer the item that was promised to `owner` to the next waiter."""
        key = self._drop_promise(owner)
        if key is not None:
            self._serve_queue(key)

    def _drop_promise(self, owner: Hashable) -> bytes | None:
        key = self.promised_to.pop(owner, None)
        if key is None:
            return None
        left = self._promises[key] - 1
        if left:
            self._promises[key] = left
        else:
            del self._promises[key]
        return key

    def _free_items(self, key: bytes) -> int:
        queue = self.queues.get(key)
        return len(queue) - self._promises.get(key, 0) if queue else 0

    def _promise(self, owner: Hashable, key: bytes) -> None:
        self.promised_to[owner] = key
        self._promises[key] = self._promises.get(key, 0) + 1

    def _serve_queue(self, key: bytes) -> None:
        """Wake a queue's waiters if it is not empty, and hand unreserved items to them."""
        waiters = list(self.waiting.get(key, ()))
        for waiter in waiters:
            if waiter.wants is Wants.WAKE and key in self.queues:
                self._look_again(waiter)
        for waiter in waiters:
            if self._free_items(key) <= 0:
                return
            if waiter.wants is Wants.ITEM:
                waiter.value = self._take(key)
                self._satisfy(waiter)
            elif waiter.wants is Wants.CLAIM and waiter.owner not in self.promised_to:
                self._look_again(waiter)

    def _take(self, key: bytes) -> bytes:
        queue = self.queues[key]
        item = queue.popleft()
        if not queue:
            del self.queues[key]
        return item

    # Waiting.

    def wait(self, owner: Hashable, wants: Wants, keys: list[bytes]) -> Waiter | None:
        """Start waiting until all of `keys` are present; return None if they already are.

        A non-empty queue also counts as present for WAKE and CLAIM, but not for VALUE and VALUES.
        """
        if all(key in self.values for key in keys):
            return None
        waiter = Waiter(owner, wants, keys)
        waiter.missing = self._missing(waiter)
        if not waiter.missing:
            self._claim(waiter)
            return None
        self._register(waiter)
        return waiter

    def _claim(self, waiter: Waiter) -> None:
        """Once a wait for a single queue is over, reserve an item for the waiter's owner."""
        key = waiter.keys[0] if waiter.keys else b""
        if waiter.wants is not Wants.CLAIM or key in self.values or len(waiter.keys) != 1:
            return
        if waiter.owner not in self.promised_to:
            self._promise(waiter.owner, key)

    def wait_item(self, owner: Hashable, key: bytes) -> Waiter | bytes:
        """Take the oldest free item from a queue, or start waiting for one."""
        count, item = self.pop(key, owner)
        if count:
            return item
        waiter = Waiter(owner, Wants.ITEM, [key], {key})
        self._register(waiter)
        return waiter

    def _missing(self, waiter: Waiter) -> builtins.set[bytes]:
        values, queues = self.values, self.queues
        if waiter.wants in (Wants.VALUE, Wants.VALUES):
            return {key for key in waiter.keys if key not in values}
        if waiter.wants is Wants.WAKE:
            return {key for key in waiter.keys if key not in values and key not in queues}
        return {key for key in waiter.keys if key not in values and self._free_items(key) <= 0}

    def _register(self, waiter: Waiter) -> None:
        for key in waiter.missing:
            self.waiting.setdefault(key, {})[waiter] = None
        self._waiters_of.setdefault(waiter.owner, {})[waiter] = None

    def _wake_key(self, key: bytes) -> None:
        """Satisfy or update all waiters for a key that has just received a value."""
        for waiter in list(self.waiting[key]):
            if waiter.wants is not Wants.ITEM:
                waiter.missing.discard(key)
                self._unlist(waiter, key)
                if not waiter.missing:
                    self._look_again(waiter)

    def _look_again(self, waiter: Waiter) -> None:
        """End the wait if all its keys exist; otherwise update the list of keys still missing."""
        for key in waiter.missing:
            self._unlist(waiter, key)
        waiter.missing = self._missing(waiter)
        if not waiter.missing:
            if waiter.wants is Wants.VALUE:
                waiter.value = self.values[waiter.keys[0]]
            elif waiter.wants is Wants.VALUES:
                waiter.values = [self.values[key] for key in waiter.keys]
            self._claim(waiter)
            self._satisfy(waiter)
            return
        for key in waiter.missing:
            self.waiting.setdefault(key, {})[waiter] = None

    def _satisfy(self, waiter: Waiter) -> None:
        self._unregister(waiter)
        self.woken.append(waiter)

    def _unlist(self, waiter: Waiter, key: bytes) -> None:
        listed = self.waiting.get(key)
        if listed is None:
            return
        listed.pop(waiter, None)
        if not listed:
            del self.waiting[key]

    def _unregister(self, waiter: Waiter) -> None:
        for key in waiter.missing:
            self._unlist(waiter, key)
        owned = self._waiters_of.get(waiter.owner)
        if owned is not None:
            owned.pop(waiter, None)
            if not owned:
                del self._waiters_of[waiter.owner]

    # Rounds.

    def arrive(
        self,
        owner: Hashable,
        wants: Wants,
        key: bytes,
        rank: int,
        world_size: int,
        value: bytes = b"",
    ) -> Waiter:
        """Record an arrival at a barrier or gather. The last arrival wakes all waiters.

        If a rank arrives twice, the new arrival replaces the earlier arrival, and the earlier wait
        fails.

        Raises:
            ValueError: the arrival is invalid or contradicts earlier arrivals.
        """
        named = rank >= 0 or wants is Wants.GATHER
        if not 1 <= world_size <= MAX_WORLD_SIZE or (named and not 0 <= rank < world_size):
            raise ValueError(
                f"invalid rank {rank} or world size {world_size} at key {show_key(key)}"
            )
        round_ = self.rounds.setdefault(key, Round(wants, world_size))
        if (round_.wants, round_.world_size) != (wants, world_size):
            raise ValueError(
                f"this is a {wants.value} of {world_size} ranks at key {show_key(key)}, but "
                f"other ranks are already waiting there in a {round_.wants.value} of "
                f"{round_.world_size} ranks"
            )
        earlier = round_.by_rank.get(rank)
        if earlier is not None:
            earlier.failure = f"rank {rank} arrived again at {show_key(key)}, in another process"
            round_.remove(earlier)
            self._satisfy(earlier)
        waiter = Waiter(owner, wants, [key], rank=rank, value=value)
        round_.add(waiter)
        self._waiters_of.setdefault(owner, {})[waiter] = None
        if len(round_.arrivals) == world_size:
            self._complete(key, round_)
        return waiter

    def _complete(self, key: bytes, round_: Round) -> None:
        del self.rounds[key]
        values: list[bytes] | None = None
        if round_.wants is Wants.GATHER:
            values = [w.value for w in sorted(round_.arrivals, key=lambda w: w.rank)]
        for waiter in round_.arrivals:
            waiter.values = values
            self._satisfy(waiter)

    # Owners.

    def withdraw(self, waiter: Waiter) -> None:
        """Stop a wait: undo any arrival, and unregister the waiter from all its keys."""
        round_ = self.rounds.get(waiter.keys[0]) if waiter.keys else None
        if round_ is not None and waiter in round_.arrivals:
            round_.remove(waiter)
            if not round_.arrivals:
                del self.rounds[waiter.keys[0]]
        self._unregister(waiter)

    def story_of(self, waiter: Waiter) -> RoundStory:
        """Return the status of a waiter's barrier or gather, to be included in a timeout error."""
        round_ = self.rounds.get(waiter.keys[0]) if waiter.keys else None
        if round_ is None or waiter not in round_.arrivals:
            return 0, 0, []
        return round_.world_size, len(round_.arrivals), round_.missing_ranks()

    def waiters_of(self, owner: Hashable) -> list[Waiter]:
        """Return the waiters that belong to an owner."""
        return list(self._waiters_of.get(owner, ()))

    def num_waits_of(self, owner: Hashable) -> int:
        """Return the number of waiters that belong to an owner."""
        return len(self._waiters_of.get(owner, ()))

    def set_presence(self, owner: Hashable, key: bytes, value: bytes) -> None:
        """Store a value under a presence key, which is deleted when its presence ends."""
        self.set(key, value)
        self.present_by[key] = owner

    def end_presence(self, owner: Hashable, key: bytes) -> None:
        """Delete one of an owner's presence keys, unless its value has been replaced."""
        if self.present_by.get(key) is owner:
            self.delete(key)

    def forget(self, owner: Hashable) -> None:
        """Withdraw all waits of an owner that has left, and release the owner's reserved item."""
        for waiter in self.waiters_of(owner):
            self.withdraw(waiter)
        self.release_promise(owner)

    def waiting_keys(self) -> dict[str, int]:
        """Return the number of waiters for each key, including those in barriers and gathers."""
        waiting = {show_key(key): len(waiters) for key, waiters in self.waiting.items()}
        for key, round_ in self.rounds.items():
            waiting[show_key(key)] = waiting.get(show_key(key), 0) + len(round_.arrivals)
        return waiting

    def num_waiters(self) -> int:
        """Return the number of pending waits."""
        return sum(map(len, self._waiters_of.values()))

    def num_presences(self) -> int:
        """Return the number of keys that will be deleted when a client's presence ends."""
        return len(self.present_by)

    def _tell(self, key: bytes, value: bytes | None) -> None:
        if key in self.watched and self.on_change is not None:
            self.on_change(key, value)


def show_key(key: bytes) -> str:
    """Return a key as the user wrote it, without the leading "/" of the wire form.

    Terminal control characters are escaped.
    """
    text = key.decode("utf-8", "replace").removeprefix("/")
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
