"""Provide FileStore, a store that saves its contents in a shared file.

The file is a log: a header, followed by one record per change. To make a change, a writer locks the
file, reads the records that other processes have appended, and appends its own record in a single
write. If a writer dies, its lock is released, and the next writer removes any incomplete record.

FileStore is meant for tests and for hosts that share a folder but cannot connect to each other.
Waiting processes poll the file. The file grows with every change. Dead processes are not detected.
"""

from __future__ import annotations

import contextlib
import os
import random
import stat
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, TypeVar

from echelon.errors import StoreError, StoreTimeoutError
from echelon.store.base import DEFAULT_TIMEOUT_S, Observer, Store
from echelon.store.deadline import Deadline, Timeout, seconds
from echelon.store.forks import keep_from_children
from echelon.store.state.state import StoreState
from echelon.store.wire import protocol as p
from echelon.store.wire.limits import Limits
from echelon.store.wire.parser import Parser

T = TypeVar("T")

_HEADER: Final = b"echelon store file 2\n"
# Bytes of the command, CRC32 of it; CRC32 of both and of the record's place in the file.
_RECORD: Final = struct.Struct("<III")
_PLACED: Final = struct.Struct("<IIQ")
_READ_BYTES: Final = 1 << 30
_FIRST_LOOK_S: Final = 0.001
_LAST_LOOK_S: Final = 0.05
_MISSING: Final = object()


class FileStore(Store):
    """A store that saves its contents in a shared file.

    Args:
        file_name: the path of the file. A missing file is created with read and write access for
            its owner only. The folder must exist, and its file system must support locks.
        world_size: accepted for compatibility with torch; has no effect.
        timeout: the timeout of calls that do not specify their own.
        observer: see `Store.observer`.

    Raises:
        StoreError: the file cannot be opened or is not a store file.

    Example:
        >>> store = FileStore("rendezvous", timeout=10)
        >>> store.set("rank_0", b"10.0.0.1")
        >>> FileStore("rendezvous").get("rank_0")  # in any process that can open the file
        b'10.0.0.1'
    """

    def __init__(
        self,
        file_name: str | Path,
        world_size: int | None = None,  # noqa: ARG002 - torch's signature
        timeout: Timeout = DEFAULT_TIMEOUT_S,
        *,
        observer: Observer | None = None,
    ) -> None:
        self._timeout_s = seconds(timeout)
        self._observer = observer
        self.path = Path(file_name)
        self._lock = threading.Lock()
        self._descriptor = -1
        self._open()
        keep_from_children(self)

    @property
    def endpoint(self) -> str:
        """The path of the file."""
        return str(self.path)

    def clone(self) -> FileStore:
        """Return another store for the same file."""
        return FileStore(self.path, timeout=self._timeout_s, observer=self._observer)

    def close(self) -> None:
        """Close the file without deleting it."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # interpreter shutdown: what is gone is gone
            self.close()

    # The file.

    def _open(self) -> None:
        """Reopen the file and discard the in-memory state."""
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            self._descriptor = os.open(self.path, flags, 0o600)
        except OSError as error:
            raise self._error(f"cannot open the file: {error.strerror}") from None
        try:
            self._check_owner(os.fstat(self._descriptor))
        except StoreError:
            self.close()
            raise
        self._pid = os.getpid()
        self._state = StoreState()
        self._read_to = 0

    def _check_owner(self, status: os.stat_result) -> None:
        """Check that only the current user can modify the file.

        Raises:
            StoreError: the file is not a regular file, or another user owns it or can write to it.
        """
        if not stat.S_ISREG(status.st_mode):
            raise self._error("the path is not a regular file")
        if status.st_uid != os.geteuid():
            raise self._error(f"the file belongs to another user (UID {status.st_uid})")
        if status.st_mode & 0o022:
            raise self._error("other users can write to the file; run chmod 600 on it")

    def descriptors(self) -> list[int]:
        """Return the file's descriptor."""
        return [self._descriptor]

    def _error(self, text: str) -> StoreError:
        return StoreError(f"FileStore {self.path}: {text}", endpoint=str(self.path))

    @contextmanager
    def _locked(self, deadline: Deadline) -> Iterator[StoreState]:
        """Lock the file and update the in-memory state from it; unlock the file after the block."""
        import fcntl

        if not self._lock.acquire(timeout=deadline.left_s):
            raise self._busy(deadline)
        try:
            if self._descriptor < 0:
                raise self._error("the store is closed")
            if self._pid != os.getpid():
                # A forked child shares the lock of its parent's descriptor: it needs its own.
                os.close(self._descriptor)
                self._open()
            delay_s = _FIRST_LOOK_S
            while True:
                with contextlib.suppress(BlockingIOError):
                    fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                if deadline.left_s <= 0:
                    raise self._busy(deadline)
                time.sleep(delay_s * random.uniform(0.5, 1.0))
                delay_s = min(2 * delay_s, _LAST_LOOK_S)
            try:
                self._catch_up()
                yield self._state
            finally:
                fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        finally:
            self._lock.release()

    def _busy(self, deadline: Deadline) -> StoreTimeoutError:
        return StoreTimeoutError(
            f"FileStore {self.path}: locked by another process for {deadline.timeout_s:.1f} s. "
            f"Check whether a process that uses it is stopped",
            endpoint=str(self.path),
        )

    def _catch_up(self) -> None:
        """Read the records appended since the last read, and remove an incomplete last record."""
        size = os.fstat(self._descriptor).st_size
        if self._read_to == 0:
            self._check_header(size)
            size = max(size, len(_HEADER))
        if size < self._read_to:
            raise self._error("the file became shorter: another process truncated or replaced it")
        data = self._read(size)
        position = 0
        while position + _RECORD.size <= len(data):
            length, checksum, of_header = _RECORD.unpack_from(data, position)
            at = self._read_to + position
            if zlib.crc32(_PLACED.pack(length, checksum, at)) != of_header:
                raise self._error(f"the file is damaged at byte {at}")
            start = position + _RECORD.size
            command = data[start : start + length]
            if len(command) < length:
                break
            if zlib.crc32(command) != checksum:
                raise self._error(f"the file is damaged at byte {at}")
            try:
                self._replay(command)
            except (ValueError, KeyError) as error:
                raise self._error(f"the file is damaged at byte {at}: {error}") from None
            position = start + length
        self._read_to += position
        if position < len(data):  # what a writer that died had begun: its header is whole or cut
            os.ftruncate(self._descriptor, self._read_to)

    def _read(self, size: int) -> bytes:
        """Return the file's unread bytes up to offset `size`."""
        pieces: list[bytes] = []
        at = self._read_to
        while at < size:
            piece = os.pread(self._descriptor, min(size - at, _READ_BYTES), at)
            if not piece:
                raise self._error("the file became shorter while it was read")
            pieces.append(piece)
            at += len(piece)
        return b"".join(pieces)

    def _check_header(self, size: int) -> None:
        found = os.pread(self._descriptor, len(_HEADER), 0)
        if found == _HEADER:
            pass
        elif size < len(_HEADER) and _HEADER.startswith(found):
            os.pwrite(self._descriptor, _HEADER, 0)
        else:
            raise self._error(f"the file is not a store (it begins with {found[:16]!r})")
        self._read_to = len(_HEADER)

    def _replay(self, command: bytes) -> None:
        """Apply one recorded change to the state."""
        parser = Parser(_LIMITS)
        parser.admitted = True
        messages = parser.feed(_OPENING + command)
        if parser.violation is not None or len(messages) != 1:
            raise ValueError(parser.violation or "expected exactly one command")
        query, *operands = messages[0]
        act = _REPLAY.get(query) if isinstance(query, int) else None
        if act is None:
            raise ValueError(f"the file contains query {query}, which does not change the store")
        act(self._state, *operands)

    def _append(self, query: int, *fields: bytes | list[bytes]) -> None:
        """Append a change to the file, and apply the change to the in-memory state.

        The caller must hold the lock.
        """
        command = p.encode(query, *fields)
        self._append_record(command)
        self._replay(command)

    def _append_record(self, command: bytes) -> None:
        length, checksum = len(command), zlib.crc32(command)
        of_header = zlib.crc32(_PLACED.pack(length, checksum, self._read_to))
        record = _RECORD.pack(length, checksum, of_header) + command
        try:
            written = os.pwrite(self._descriptor, record, self._read_to)
        except OSError as error:
            os.ftruncate(self._descriptor, self._read_to)
            raise self._error(f"cannot write: {error.strerror}") from None
        if written != len(record):
            os.ftruncate(self._descriptor, self._read_to)
            raise self._error("cannot write: the file system is full")
        self._read_to += written

    def _look(self, read: Callable[[StoreState], T], deadline: Deadline | None = None) -> T:
        with self._locked(deadline or Deadline(self._timeout_s)) as state:
            return read(state)

    def _change(self, query: int, *fields: bytes | list[bytes]) -> None:
        with self._locked(Deadline(self._timeout_s)):
            self._append(query, *fields)

    def _await(self, read: Callable[[StoreState], T | object], deadline: Deadline) -> T | object:
        """Poll until `read` returns a value, and return it; at the deadline, return _MISSING."""
        delay_s = _FIRST_LOOK_S
        while True:
            found = self._look(read, Deadline(max(deadline.left_s, _LAST_LOOK_S)))
            left_s = deadline.left_s
            if found is not _MISSING or left_s <= 0:
                return found
            time.sleep(min(delay_s * random.uniform(0.5, 1.0), left_s))
            delay_s = min(2 * delay_s, _LAST_LOOK_S)

    # Operations.

    def _do_set(self, key: bytes, value: bytes) -> None:
        self._change(p.SET, key, value)

    def _do_get(self, key: bytes, deadline: Deadline) -> bytes:
        value = self._await(lambda state: state.values.get(key, _MISSING), deadline)
        if not isinstance(value, bytes):
            self._raise_wait_timeout("get", [key], [key], deadline)
        return value

    def _do_add(self, key: bytes, amount: int) -> int:
        with self._locked(Deadline(self._timeout_s)) as state:
            try:
                total = state.sum_with(key, amount)
            except ValueError as error:
                raise self._error(f"add: {error}") from None
            self._append(p.SET, key, b"%d" % total)
            return total

    def _do_append(self, key: bytes, value: bytes) -> None:
        self._change(p.APPEND, key, value)

    def _do_check(self, keys: list[bytes]) -> bool:
        return self._look(lambda state: all(map(state.is_present, keys)))

    def _do_compare_set(self, key: bytes, expected: bytes, desired: bytes) -> bytes:
        with self._locked(Deadline(self._timeout_s)) as state:
            held = state.values.get(key)
            self._append(p.COMPARE_SET, key, expected, desired)
            return expected if held is None and expected else state.values[key]

    def _do_delete(self, key: bytes) -> bool:
        with self._locked(Deadline(self._timeout_s)) as state:
            was_there = state.is_present(key)
            if was_there:
                self._append(p.DELETE_KEY, key)
            return was_there

    def _do_wait(self, keys: list[bytes], deadline: Deadline) -> None:
        def read(state: StoreState) -> object:
            return None if all(map(state.is_present, keys)) else _MISSING

        if self._await(read, deadline) is _MISSING:
            missing = [key for key in keys if not self._do_check([key])]
            self._raise_wait_timeout("wait", keys, missing, deadline)

    def _do_num_keys(self) -> int:
        return self._look(lambda state: len(state.values))

    def _do_list_keys(self) -> list[bytes]:
        return self._look(lambda state: list(state.values))

    def _do_multi_get(self, keys: list[bytes], deadline: Deadline) -> list[bytes]:
        def read(state: StoreState) -> object:
            if all(key in state.values for key in keys):
                return [state.values[key] for key in keys]
            return _MISSING

        values = self._await(read, deadline)
        if not isinstance(values, list):
            missing = [key for key in keys if not self._do_check([key])]
            self._raise_wait_timeout("multi_get", keys, missing, deadline)
        return values

    def _do_multi_set(self, keys: list[bytes], values: list[bytes]) -> None:
        pairs = [piece for pair in zip(keys, values, strict=True) for piece in pair]
        self._change(p.MULTI_SET, pairs)

    def _do_queue_push(self, key: bytes, value: bytes) -> None:
        self._change(p.QUEUE_PUSH, key, value)

    def _do_queue_pop(self, key: bytes) -> bytes | None:
        item = self._pop(key, Deadline(self._timeout_s))
        return item if isinstance(item, bytes) else None

    def _do_queue_pop_wait(self, key: bytes, deadline: Deadline) -> bytes:
        while True:
            left = Deadline(max(deadline.left_s, _LAST_LOOK_S))
            item = self._pop(key, left)
            if isinstance(item, bytes):
                return item
            if self._await(lambda s: None if key in s.queues else _MISSING, deadline) is _MISSING:
                self._raise_wait_timeout("queue_pop", [key], [key], deadline)

    def _pop(self, key: bytes, deadline: Deadline) -> object:
        with self._locked(deadline) as state:
            if key not in state.queues:
                return _MISSING
            item = state.queues[key][0]
            self._append(p.QUEUE_POP, key)
            return item

    def _do_queue_len(self, key: bytes) -> int:
        return self._look(lambda state: state.queue_length(key))


_LIMITS: Final = Limits()
_OPENING: Final = p.encode(p.VALIDATE, p.VALIDATE_MAGIC)
_REPLAY: Final[dict[int, Callable[..., object]]] = {
    p.SET: StoreState.set,
    p.APPEND: StoreState.append,
    p.COMPARE_SET: StoreState.compare_set,
    p.DELETE_KEY: StoreState.delete,
    p.MULTI_SET: lambda state, pairs: state.set_many(zip(pairs[::2], pairs[1::2], strict=True)),
    p.QUEUE_PUSH: StoreState.push,
    p.QUEUE_POP: lambda state, key: state.pop(key, None),
}
