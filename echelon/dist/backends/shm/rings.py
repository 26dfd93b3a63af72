"""Provide byte streams in shared memory: one ring per ordered pair of ranks.

A ring's `tail` counts the bytes written, and its `head` counts the bytes read. Both counters wrap
at twice the size of the ring, so that a full ring can be distinguished from an empty one. A rank
that advances a counter rings the other rank's doorbell, which wakes that rank's message thread.

[Note: no ring of a bell is lost] A sender stores the tail, makes a system call (a full barrier),
stores a new value in the bell, and wakes the threads that sleep on the bell. A waiting thread reads
the bell, checks all rings, and sleeps only while the bell's value is unchanged. The waiting thread
therefore either reads the new tail or does not sleep. No two ranks ever store the same value,
because a repeated value could go unnoticed.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from echelon.dist.backends.shm import futex
from echelon.dist.backends.shm.segment import Segment
from echelon.dist.messages.driver import StreamBroken

_U32 = 0xFFFFFFFF
_STRIDE_BYTES = 64 << 10  # copied between two announcements

Gone = Callable[[], list[tuple[int, str]]]


class Rings:
    """One rank's byte streams in the pure-Python engine."""

    slice_s = 0.1  # a peer that dies rings no bell

    def __init__(self, segment: Segment, rank: int, gone: Gone) -> None:
        """Set up the streams; `gone` returns (peer, reason) for each peer that has ended."""
        self._segment = segment
        self._words = segment.words
        self._rank = rank
        self._gone = gone
        self._peers = [peer for peer in range(segment.size) if peer != rank]
        self._bell = segment.bell_word(rank)
        self._num_rung = 0
        self._full: set[int] = set()
        self._dropped: set[int] = set()
        self._is_closed = False

    def open(self, peer: int) -> None:
        """Do nothing, because rings exist from the start."""

    def drop(self, peer: int) -> None:
        """Stop reading from and writing to a peer."""
        self._dropped.add(peer)
        self._full.discard(peer)

    def wait(self, timeout_s: float) -> list[int]:
        """Block until the bell rings or the timeout expires; return immediately if work is pending.

        Returns:
            The peers from which data can be read.
        """
        seen = self._words[self._bell]
        readable = self._readable()
        if not readable and not self._has_room() and timeout_s > 0:
            futex.wait(self._segment.address(self._bell), seen, timeout_s)
            readable = self._readable()
        return readable

    def writable(self) -> list[int]:
        """Return the peers whose rings were full and now have space again."""
        free = self._has_room()
        self._full.difference_update(free)
        return free

    def read(self, peer: int, view: memoryview) -> int:
        """Copy as much of a peer's data as fits into `view`; return the number of bytes copied."""
        if peer in self._dropped:
            return 0
        ring = self._segment.ring(peer, self._rank)
        tail_word, head_word = self._segment.ring_words(peer, self._rank)
        into = np.frombuffer(view, np.uint8)
        done = 0
        while done < len(into):
            head = self._words[head_word]
            there = (self._words[tail_word] - head) % (2 * len(ring))
            count = min(there, len(into) - done, len(ring) - head % len(ring), _STRIDE_BYTES)
            if not count:
                break
            at = head % len(ring)
            into[done : done + count] = ring[at : at + count]
            done += count
            self._move(head_word, (head + count) % (2 * len(ring)), peer)
        return done

    def has_unread(self, peer: int) -> bool:
        """Return whether unread data from a peer has arrived. Safe on any thread."""
        return not self._is_closed and peer not in self._dropped and self._num_there(peer) > 0

    def write(self, peer: int, views: list[memoryview]) -> int:
        """Copy as much data into a peer's ring as fits; return the number of bytes copied."""
        if peer in self._dropped:
            raise StreamBroken("the peer has left the group")
        done = 0
        for view in views:
            count = self._write(peer, np.frombuffer(view, np.uint8)) if len(view) else 0
            done += count
            if count < len(view):
                self._full.add(peer)
                break
        return done

    def broken(self) -> list[tuple[int, str]]:
        """Return (peer, reason) for each peer that has ended and left no unread data."""
        return [
            (peer, why)
            for peer, why in self._gone()
            if peer not in self._dropped and not self._num_there(peer)
        ]

    def wake(self) -> None:
        """Ring this rank's own bell, so that `wait` returns."""
        if not self._is_closed:
            self._ring(self._rank)

    def close(self) -> None:
        """Stop using the shared memory."""
        self._is_closed = True

    def _write(self, peer: int, data: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> int:
        ring = self._segment.ring(self._rank, peer)
        tail_word, head_word = self._segment.ring_words(self._rank, peer)
        done = 0
        while done < len(data):
            tail = self._words[tail_word]
            used = (tail - self._words[head_word]) % (2 * len(ring))
            at = tail % len(ring)
            count = min(len(ring) - used, len(ring) - at, len(data) - done, _STRIDE_BYTES)
            if not count:
                break
            ring[at : at + count] = data[done : done + count]
            done += count
            self._move(tail_word, (tail + count) % (2 * len(ring)), peer)
        return done

    def _move(self, word: int, value: int, peer: int) -> None:
        futex.publish(self._segment, word, value, wakes=True)  # its system call is the barrier
        self._ring(peer)

    def _ring(self, rank: int) -> None:
        self._num_rung += 1
        bell = self._segment.bell_word(rank)
        value = (self._num_rung * self._segment.size + self._rank) & _U32
        futex.publish(self._segment, bell, value, wakes=True)

    def _num_there(self, peer: int) -> int:
        tail, head = self._segment.ring_words(peer, self._rank)
        return (self._words[tail] - self._words[head]) % (2 * self._segment.ring_bytes)

    def _readable(self) -> list[int]:
        return [p for p in self._peers if p not in self._dropped and self._num_there(p)]

    def _has_room(self) -> list[int]:
        free = []
        for peer in self._full:
            tail, head = self._segment.ring_words(self._rank, peer)
            used = (self._words[tail] - self._words[head]) % (2 * self._segment.ring_bytes)
            if used < self._segment.ring_bytes:
                free.append(peer)
        return free
