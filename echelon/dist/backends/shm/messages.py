"""Sends and receives of the pure-Python engine: one byte ring for each ordered pair of ranks.

A message is a head of one line (64 bytes) and its body, padded to whole lines. Messages are read in
the order in which they were sent; one whose tag nobody waits for yet is put aside.
"""

from __future__ import annotations

import struct
import threading
from collections import defaultdict, deque
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from echelon.dist.backends.shm import futex
from echelon.dist.backends.shm.segment import LINE_BYTES, Segment
from echelon.dist.operation.operation import Operation

_HEAD = struct.Struct("<Qi16s")
_STRIDE_LINES = 1024  # copied between two announcements
_U32 = 0xFFFFFFFF

Bytes = npt.NDArray[np.uint8]
Wait = Callable[[Operation, float, int, int], None]


class _Inbox:
    """Messages from one peer that came before somebody asked for their tag."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.is_read = False  # some thread is reading the ring
        self.aside: dict[int, deque[tuple[str, Bytes]]] = defaultdict(deque)


class Mailbox:
    """A rank's ends of the message rings."""

    def __init__(self, segment: Segment, rank: int, wait: Wait) -> None:
        """`wait(operation, deadline_s, word, seen)` sleeps while a word is `seen`, or raises."""
        self._segment = segment
        self._words = segment.words
        self._rank = rank
        self._wait = wait
        self._num_lines = segment.ring_bytes // LINE_BYTES
        self._inboxes: dict[int, _Inbox] = defaultdict(_Inbox)
        self._lock = threading.Lock()

    def send(self, operation: Operation, deadline_s: float) -> None:
        """Write a message; returns when its last line is in the ring."""
        assert operation.source is not None
        body = operation.source.view(np.uint8)
        head = _HEAD.pack(len(body), operation.tag, operation.dtype.encode())
        lines = np.zeros(LINE_BYTES, np.uint8)
        lines[: len(head)] = np.frombuffer(head, np.uint8)
        self._write(operation, deadline_s, lines)
        self._write(operation, deadline_s, body)

    def receive(self, operation: Operation, deadline_s: float) -> bool:
        """Read the next message of this tag into place; False if it is of another kind."""
        assert operation.target is not None
        with self._lock:
            inbox = self._inboxes[operation.peer]
        while True:
            with inbox.changed:
                if inbox.aside[operation.tag]:
                    return _deliver(operation, *inbox.aside[operation.tag].popleft())
                if inbox.is_read:
                    inbox.changed.wait(0.05)
                    continue
                inbox.is_read = True
            try:
                tag, dtype, body = self._read(operation, deadline_s)
            finally:
                with inbox.changed:
                    inbox.is_read = False
                    inbox.changed.notify_all()
            if tag == operation.tag:
                return _deliver(operation, dtype, body)
            with inbox.changed:
                inbox.aside[tag].append((dtype, body))

    def wake_all(self) -> None:
        """Wake everyone who sleeps on one of this rank's rings."""
        for peer in range(self._segment.size):
            tail, _ = self._segment.ring_words(self._rank, peer)
            _, head = self._segment.ring_words(peer, self._rank)
            futex.wake(self._segment.address(tail))
            futex.wake(self._segment.address(head))

    def close(self) -> None:
        """Forget what nobody asked for."""
        self._inboxes.clear()

    def _write(self, operation: Operation, deadline_s: float, data: Bytes) -> None:
        ring = self._segment.ring(self._rank, operation.peer)
        tail_word, head_word = self._segment.ring_words(self._rank, operation.peer)
        done = 0
        while done < len(data):
            tail, head = self._words[tail_word], self._words[head_word]
            room = self._num_lines - ((tail - head) & _U32)
            if not room:
                self._wait(operation, deadline_s, head_word, head)
                continue
            at = tail % self._num_lines
            num_lines = min(room, self._num_lines - at, _STRIDE_LINES)
            piece = data[done : done + num_lines * LINE_BYTES]
            ring[at * LINE_BYTES : at * LINE_BYTES + len(piece)] = piece
            done += len(piece)
            self._move(tail_word, tail, len(piece))

    def _read(self, operation: Operation, deadline_s: float) -> tuple[int, str, Bytes]:
        head = self._take(operation, deadline_s, LINE_BYTES)
        num_bytes, tag, dtype = _HEAD.unpack_from(head.tobytes())
        body = self._take(operation, deadline_s, num_bytes)
        return tag, dtype.rstrip(b"\0").decode("ascii", "replace"), body

    def _take(self, operation: Operation, deadline_s: float, num_bytes: int) -> Bytes:
        ring = self._segment.ring(operation.peer, self._rank)
        tail_word, head_word = self._segment.ring_words(operation.peer, self._rank)
        data: Bytes = np.empty(num_bytes, np.uint8)
        done = 0
        while done < num_bytes:
            tail, head = self._words[tail_word], self._words[head_word]
            there = (tail - head) & _U32
            if not there:
                self._wait(operation, deadline_s, tail_word, tail)
                continue
            at = head % self._num_lines
            num_lines = min(there, self._num_lines - at, _STRIDE_LINES)
            piece = data[done : done + num_lines * LINE_BYTES]
            piece[:] = ring[at * LINE_BYTES : at * LINE_BYTES + len(piece)]
            done += len(piece)
            self._move(head_word, head, len(piece))
        return data

    def _move(self, word: int, value: int, num_bytes: int) -> None:
        lines = -(-num_bytes // LINE_BYTES)
        futex.publish(self._segment, word, (value + lines) & _U32, True)


def _deliver(operation: Operation, dtype: str, body: Bytes) -> bool:
    assert operation.target is not None
    if dtype != operation.dtype or len(body) != operation.target.nbytes:
        return False
    operation.target.view(np.uint8)[:] = body
    return True
