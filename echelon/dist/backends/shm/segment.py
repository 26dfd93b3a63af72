"""Define the memory layout of the pure-Python engine.

    per rank: control block (one page) ... | per rank: two data slots | per pair: message ring

A control block holds
    0     u32  published: number of phases that the rank has announced; other ranks sleep on it
    4     u32  failed: a `Fault` once the rank has left the group, normally or not
    8     u32  number of ranks that the rank blames, then up to 64 of these ranks as u32
    272   u32  number of collectives that the rank finished before it left
    512   u32  doorbell of the rank's message thread, see rings.py
    1024  two alternating headers, 1024 bytes each: the rank's calls in the current and the previous
        collective

A message ring holds
    0     u32  tail: bytes written, modulo twice the ring's size; stored by the sender
    64    u32  head: bytes read, modulo twice the ring's size; stored by the receiver
    128   the ring's bytes
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from echelon.dist.backends.shm.memory import SharedMemory
from echelon.dist.operation.arrays import Flat

CONTROL_BYTES = 4096
HEADER_BYTES = 1024
LINE_BYTES = 64
RING_HEAD_BYTES = 2 * LINE_BYTES
_HEADERS_OFFSET = 1024
_BLAMED_OFFSET = 8
_ENDED_OFFSET = 272
_BELL_OFFSET = 512
_MAX_BLAMED = 64


class Segment:
    """Views of the engine's region of the shared memory."""

    def __init__(self, memory: SharedMemory, slot_bytes: int, ring_bytes: int) -> None:
        self.size = memory.size
        self.slot_bytes = slot_bytes
        self.ring_bytes = ring_bytes
        self._bytes: npt.NDArray[np.uint8] = np.frombuffer(memory.map, np.uint8)[memory.offset :]
        self._view = memoryview(memory.map)[memory.offset :]
        self.words = self._view.cast("I")
        self._address = self._bytes.ctypes.data

    def address(self, word: int) -> int:
        """Return a shared word's address in this process's address space."""
        return self._address + 4 * word

    def bell_word(self, rank: int) -> int:
        """Return the index of the word that serves as a rank's doorbell."""
        return (rank * CONTROL_BYTES + _BELL_OFFSET) // 4

    def slot(self, rank: int, parity: int) -> npt.NDArray[np.uint8]:
        """Return one of a rank's two data slots, [slot_bytes] of uint8."""
        start = self.size * CONTROL_BYTES + (2 * rank + parity) * self.slot_bytes
        return self._bytes[start : start + self.slot_bytes]

    def typed(self, rank: int, parity: int, like: Flat, count: int) -> Flat:
        """Return the first `count` items of a slot as an array with the dtype of `like`."""
        return self.slot(rank, parity)[: count * like.itemsize].view(like.dtype)

    def ring_words(self, sender: int, receiver: int) -> tuple[int, int]:
        """Return the indices of the words that store a ring's tail and head."""
        start = self._ring_start(sender, receiver) // 4
        return start, start + LINE_BYTES // 4

    def ring(self, sender: int, receiver: int) -> npt.NDArray[np.uint8]:
        """Return the bytes of a message ring, [ring_bytes] of uint8."""
        start = self._ring_start(sender, receiver) + RING_HEAD_BYTES
        return self._bytes[start : start + self.ring_bytes]

    def _ring_start(self, sender: int, receiver: int) -> int:
        rings = self.size * (CONTROL_BYTES + 2 * self.slot_bytes)
        return rings + (sender * self.size + receiver) * (RING_HEAD_BYTES + self.ring_bytes)

    def write_header(self, rank: int, parity: int, data: bytes) -> None:
        """Write the description of a rank's call, truncated if necessary."""
        start = rank * CONTROL_BYTES + _HEADERS_OFFSET + parity * HEADER_BYTES
        data = data[: HEADER_BYTES - 2]
        self._view[start : start + 2 + len(data)] = len(data).to_bytes(2, "little") + data

    def read_header(self, rank: int, parity: int) -> bytes:
        """Read the description of a rank's call."""
        start = rank * CONTROL_BYTES + _HEADERS_OFFSET + parity * HEADER_BYTES
        raw = bytes(self._view[start : start + HEADER_BYTES])
        return raw[2 : 2 + int.from_bytes(raw[:2], "little")]

    def blame(self, rank: int, fault: int, blamed: list[int], num_ended: int) -> None:
        """Record why `rank` left the group, and which ranks it blames.

        Args:
            num_ended: the number of collectives that `rank` had finished.
        """
        base = rank * CONTROL_BYTES // 4
        if self.words[base + 1]:
            return
        blamed = blamed[:_MAX_BLAMED]
        for place, culprit in enumerate(blamed):
            self.words[base + _BLAMED_OFFSET // 4 + 1 + place] = culprit
        self.words[base + _BLAMED_OFFSET // 4] = len(blamed)
        self.words[base + _ENDED_OFFSET // 4] = num_ended & 0xFFFFFFFF
        self.words[base + 1] = fault

    def blamed_by(self, rank: int) -> tuple[int, list[int]]:
        """Return a rank's `Fault` and the ranks that it blames; (0, []) if it has not left."""
        base = rank * CONTROL_BYTES // 4
        fault = self.words[base + 1]
        if not fault:
            return 0, []
        count = min(self.words[base + _BLAMED_OFFSET // 4], _MAX_BLAMED)
        first = base + _BLAMED_OFFSET // 4 + 1
        return fault, [r for r in self.words[first : first + count].tolist() if r < self.size]

    def num_ended(self, rank: int) -> int:
        """Return how many collectives a rank finished before it left, modulo 2^32."""
        return int(self.words[rank * CONTROL_BYTES // 4 + _ENDED_OFFSET // 4])

    def close(self) -> None:
        """Release the views of the shared memory."""
        self.words.release()
        self._view.release()
        del self._bytes


def segment_bytes(size: int, slot_bytes: int, ring_bytes: int) -> int:
    """Return the size of the engine's region of the shared memory, in bytes."""
    rings = size * size * (RING_HEAD_BYTES + ring_bytes)
    return size * (CONTROL_BYTES + 2 * slot_bytes) + rings
