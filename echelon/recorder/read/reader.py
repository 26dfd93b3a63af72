"""Read black boxes: live rings, rings of dead processes, and dump files.

The readers modify nothing and are safe to use on untrusted files. Data that fails a check is
omitted and counted in `Record.warnings`. A file that is not a black box raises `DumpFormatError`.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from typing import Any
from zlib import crc32

import msgpack
import numpy as np
import numpy.typing as npt

from echelon.errors import DumpFormatError
from echelon.recorder.format.layout import LIVE_BYTES, LIVE_OFFSET, OPEN_SPANS_OFFSET, Layout
from echelon.recorder.format.schema import (
    DUMP_CRC_MARK,
    DUMP_KIND,
    KEPT_OPERATION,
    NUM_KEPT,
    NUM_OPEN_SPANS,
    OPERATION_SLOT,
    RING_MAGIC,
    SPAN_SLOT,
    Live,
    Record,
    State,
)
from echelon.recorder.protection import protect, release
from echelon.recorder.read.damage import Damage
from echelon.recorder.read.dump_parser import record_of_dump
from echelon.recorder.read.ring_calls import RingCalls
from echelon.recorder.read.ring_header import (
    check_header,
    read_fault,
    read_identity,
    read_last_words,
)
from echelon.recorder.read.ring_parser import RingParser, is_payload_whole
from echelon.recorder.read.ring_texts import RingTexts
from echelon.recorder.read.untrusted import check_version
from echelon.recorder.stall.watchdog import Sight

_MAX_DUMP_BYTES = 1 << 28  # a ring of the largest size produces half of this
_MAX_LIST = 1 << 21  # entries of one list or map in a dump
_HEADER_BYTES = LIVE_OFFSET + LIVE_BYTES


def read(path: Path) -> Record:
    """Read a ring or a dump. The first bytes of the file determine the format.

    Raises:
        DumpFormatError: the file is neither a ring nor a dump, is too new, or cannot be opened.
    """
    try:
        with path.open("rb") as file:
            magic = file.read(len(RING_MAGIC))
    except OSError as err:
        raise DumpFormatError(f"{path}: {err.strerror or err}", path=path) from err
    return read_ring(path) if magic == RING_MAGIC else read_dump(path)


def read_ring(path: Path) -> Record:
    """Read a ring file, even while its process is still writing to it.

    Raises:
        DumpFormatError: the file is not a ring, has a newer major version, or is shorter than its
            header says.
    """
    for last_try in (False, False, True):
        record, num_torn = _read_ring_once(path)
        if not num_torn or last_try:
            break  # a dead writer's torn slot stays torn; a living writer's is whole a moment later
    return record


def _read_ring_once(path: Path) -> tuple[Record, int]:
    """Read a ring from one copy of its bytes; also return the number of torn slots."""
    layout, data = _ring_bytes(path)
    live = tuple(np.frombuffer(data, "<u8", Live.NUM_WORDS, LIVE_OFFSET).tolist())
    damage = Damage()
    texts = RingTexts(data, layout, live, damage)
    calls = RingCalls(texts, damage)
    parser = RingParser(data, layout, texts, calls, damage)
    identity = read_identity(data, path, damage)
    operations = parser.operations()
    spans = parser.spans(layout.spans_offset, layout.num_spans)
    open_spans = parser.spans(OPEN_SPANS_OFFSET, NUM_OPEN_SPANS)
    record = Record(
        path=str(path),
        identity=identity,
        operations=operations,
        spans=spans[spans["ended_mono_ns"] > 0],
        open_spans=open_spans[open_spans["ended_mono_ns"] == 0],
        strings=texts.strings,
        groups=texts.groups,
        signatures=calls.signatures,
        live=live,
        last_words=read_last_words(data, path, damage),
        fault=read_fault(data),
        warnings=tuple(damage.warnings()),
    )
    return record, damage.num_torn


def _ring_bytes(path: Path) -> tuple[Layout, bytes]:
    """Read a ring's file, up to the size declared in its header; return its layout and bytes."""
    try:
        with path.open("rb") as file:
            header = file.read(_HEADER_BYTES)
            size = file.seek(0, os.SEEK_END)
            layout = check_header(path, header, size)
            file.seek(0)
            data = file.read(layout.file_bytes)
    except OSError as err:
        raise DumpFormatError(f"{path}: {err.strerror or err}", path=path) from err
    return check_header(path, data), data


def read_dump(path: Path) -> Record:
    """Read a dump file made by `dump.write_dump`.

    Raises:
        DumpFormatError: the file is not a dump, is damaged, or has a newer major version.
    """
    try:
        if path.stat().st_size > _MAX_DUMP_BYTES:
            raise DumpFormatError(
                f"{path}: the file is too large to be a dump (over {_MAX_DUMP_BYTES} B)", path=path
            )
        data = path.read_bytes()
    except OSError as err:
        raise DumpFormatError(f"{path}: {err.strerror or err}", path=path) from err
    has_crc = data[-len(DUMP_CRC_MARK) - 4 : -4] == DUMP_CRC_MARK
    if has_crc and crc32(data[:-4]) != int.from_bytes(data[-4:], "little"):
        raise DumpFormatError(f"{path}: damaged dump (the checksum does not match)", path=path)
    try:
        top = msgpack.unpackb(
            data, raw=False, strict_map_key=True, max_array_len=_MAX_LIST, max_map_len=_MAX_LIST
        )
    except (ValueError, TypeError, msgpack.UnpackException, RecursionError, MemoryError) as err:
        raise DumpFormatError(f"{path} is not an echelon ring or dump", path=path) from err
    if not isinstance(top, dict) or top.get("kind") != DUMP_KIND:
        raise DumpFormatError(f"{path} is not an echelon ring or dump", path=path)
    check_version(path, top.get("version"))
    if not has_crc:
        raise DumpFormatError(f"{path}: damaged dump (it has no checksum)", path=path)
    try:
        return record_of_dump(path, top)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as err:
        raise DumpFormatError(f"{path}: damaged dump ({err!r:.200})", path=path) from err
    except (RecursionError, MemoryError) as err:
        raise DumpFormatError(f"{path}: damaged dump ({type(err).__name__})", path=path) from err


class LiveRing:
    """The ring of a running process, mapped read-only.

    Raises:
        DumpFormatError: the file does not exist, or is not yet a complete ring.
    """

    def __init__(self, path: Path) -> None:
        try:
            with path.open("rb") as file:
                check_header(path, file.read(_HEADER_BYTES), file.seek(0, os.SEEK_END))
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as err:  # ValueError: still empty
            raise DumpFormatError(f"{path}: {err}", path=path) from err
        try:
            layout = check_header(path, self._map)
        except DumpFormatError:
            self._map.close()
            raise
        self._path, self._identity = path, _file_identity(path)
        self._protected = protect(self._map)
        self._is_hooked = False
        self._live = np.frombuffer(self._map, "<u8", Live.NUM_WORDS, LIVE_OFFSET)
        self._slots = np.frombuffer(
            self._map, OPERATION_SLOT, layout.num_operations, layout.operations_offset
        )
        self._kept = np.frombuffer(self._map, KEPT_OPERATION, NUM_KEPT, layout.kept_offset)["slot"]
        self._spans = np.frombuffer(self._map, SPAN_SLOT, layout.num_spans, layout.spans_offset)
        self._open_spans = np.frombuffer(self._map, SPAN_SLOT, NUM_OPEN_SPANS, OPEN_SPANS_OFFSET)
        self._layout = layout

    @property
    def file(self) -> tuple[int, int]:
        """The device and inode numbers of the mapped file."""
        return self._identity

    @property
    def operation_slots(self) -> npt.NDArray[Any]:
        """The mapped slots for operations, of dtype `OPERATION_SLOT`."""
        return self._slots

    @property
    def span_slots(self) -> npt.NDArray[Any]:
        """The mapped slots for ended spans, of dtype `SPAN_SLOT`."""
        return self._spans

    @property
    def open_span_slots(self) -> npt.NDArray[Any]:
        """The ring's slots for open spans, as a memory-mapped array of dtype `SPAN_SLOT`."""
        return self._open_spans

    def text(self, ref: int) -> str:
        """Return the text at a reference, or a placeholder if it cannot be read."""
        # The map's slices are bytes, and nothing more is needed of it.
        data: Any = self._map
        return RingTexts(data, self._layout, self.words(), Damage()).text(ref)

    def words(self) -> tuple[int, ...]:
        """Return the counters and stamps in the ring's live page; see `Live`."""
        return tuple(int(word) for word in self._live)

    @property
    def is_closed(self) -> bool:
        """True if the rank has closed its ring, as it does when its program exits."""
        self._follow()
        return bool(self._live[Live.CLOSED])

    @property
    def is_hooked(self) -> bool:
        """True if hooks, rather than the program's own marks, record the rank's phases."""
        if not self._is_hooked:
            try:
                identity = read_identity(self._map[:_HEADER_BYTES], self._path, Damage())
            except DumpFormatError:
                return False
            self._is_hooked = "hooked" in identity.settings
        return self._is_hooked

    def pending(self) -> tuple[int, int]:
        """Return the oldest pending operation's call stamp, and the number of pending operations.

        Both are 0 if no operation is pending.
        """
        in_slots, num_in_slots = _oldest_open(self._slots)
        kept, num_kept = _oldest_open(self._kept)
        oldest = min((called for called in (in_slots, kept) if called), default=0)
        return oldest, num_in_slots + num_kept

    def sight(self, rank: int) -> Sight:
        """Return the state of this ring's rank in the form that the stall rule expects."""
        self._follow()
        words = self.words()
        pending_mono_ns, num_pending = self.pending()
        ended = words[Live.NUM_OPERATIONS] - num_pending + words[Live.NUM_SPANS] + words[Live.STEP]
        return Sight(
            rank=rank,
            initialized=bool(words[Live.INITIALIZED]),
            progress_mono_ns=words[Live.PROGRESS_MONO_NS],
            pending_mono_ns=pending_mono_ns,
            num_ended=ended,
        )

    def _follow(self) -> None:
        """Switch to the new ring if a later program of the same rank has replaced the file."""
        if not int(self._live[Live.CLOSED]):
            return
        now = _file_identity(self._path)
        if now in (self._identity, (0, 0)):
            return
        try:
            other = LiveRing(self._path)
        except DumpFormatError:
            return  # incomplete, or the same one at its final place: keep the old mapping
        self.close()
        self.__dict__.update(other.__dict__)

    def activity(self) -> int:
        """Return the number of events recorded so far."""
        return self.words()[Live.NUM_OPERATIONS] + self.sight(0).num_ended

    def close(self) -> None:
        """Unmap the file."""
        release(self._protected)
        del self._live, self._slots, self._kept, self._spans, self._open_spans
        self._map.close()


def _file_identity(path: Path) -> tuple[int, int]:
    try:
        status = path.stat()
    except OSError:
        return 0, 0
    return status.st_dev, status.st_ino


def _oldest_open(slots: npt.NDArray[Any]) -> tuple[int, int]:
    """Return when the oldest pending operation was called, and how many operations are pending.

    Both are 0 if no operation is pending.
    """
    state, head = slots["state"], slots["head"]
    ended = (state["head"] == head) & (state["state"] >= State.COMPLETED)
    open_slots = np.flatnonzero((head != 0) & (slots["tail"] == head) & ~ended)
    called = slots["fixed"]["created_mono_ns"][open_slots]
    # The oldest one decides about a stall, so it must not be a slot that is just being written.
    for i in np.argsort(called, kind="stable").tolist():
        copy = slots[open_slots[i] : open_slots[i] + 1].copy()
        if is_payload_whole(copy.tobytes(), 0):
            return int(copy["fixed"]["created_mono_ns"][0]), len(open_slots)
    return 0, 0
