"""Read the C functions in which a process's threads are waiting, without stopping the process.

The kernel reports the program counter and stack pointer at which a waiting thread left user space.
The function at this program counter is certain. Its callers are found by scanning the stack, where
any word that points to the end of a call instruction could be a return address. Some of these words
remain from calls that have already returned, so callers are marked with `?`, as in the kernel's own
traces.

This module only reads memory. A debugger would have to stop the process, which interrupts some
system calls, such as `epoll_wait`. Running threads are skipped, and only x86-64 is supported.
"""

from __future__ import annotations

import bisect
import os
import platform
import struct
from collections.abc import Iterator
from dataclasses import dataclass

from echelon.host.elf import function_at
from echelon.host.procfs import read_text

MAX_THREADS = 32
_MAX_FRAMES = 24
_STACK_BYTES = 1 << 13
_WORD = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class _Mapping:
    begin: int
    end: int
    offset: int
    path: str


def native_stacks(pid: int, denied: list[str]) -> str:
    """Return the C frames of a process's waiting threads, innermost first; "" if unavailable."""
    if platform.machine() != "x86_64":
        return ""
    mappings = _executable(read_text(f"/proc/{pid}/maps", "maps", denied))
    try:
        threads = sorted(map(int, os.listdir(f"/proc/{pid}/task")))  # noqa: PTH208 -- names
        memory = os.open(f"/proc/{pid}/mem", os.O_RDONLY | os.O_CLOEXEC)
    except PermissionError:
        denied.append("mem")
        return ""
    except (OSError, ValueError):
        return ""
    try:
        lines: list[str] = []
        for thread in [pid, *(one for one in threads if one != pid)][:MAX_THREADS]:
            lines += _thread(pid, thread, memory, mappings)
        return "\n".join(lines)
    finally:
        os.close(memory)


def named(frame: str) -> str:
    """Add the function's name, if known, to a frame of the form `path+0xoffset`."""
    path, _, offset = frame.rpartition("+0x")
    try:
        name = function_at(path, int(offset, 16)) if path.startswith("/") else ""
    except ValueError:
        return frame
    return f"{name} ({frame})" if name else frame


def _thread(pid: int, thread: int, memory: int, mappings: list[_Mapping]) -> Iterator[str]:
    words = read_text(f"/proc/{pid}/task/{thread}/syscall", "syscall", []).split()
    if len(words) < 3:
        return  # it is running, or may not be examined
    stack, counter = int(words[-2], 16), int(words[-1], 16)
    name = read_text(f"/proc/{pid}/task/{thread}/comm", "comm", []).strip()
    yield f"Thread {thread} {name}:"
    top = _text(counter, mappings)
    if top:
        yield f"  {top}"
    last, count = top, 0
    data = _read(memory, stack, _STACK_BYTES)
    for at in range(0, len(data) - 7, 8):
        (word,) = _WORD.unpack_from(data, at)
        text = _text(word, mappings)
        if text and text != last and _follows_call(memory, word):
            yield f"  ? {text}"
            last, count = text, count + 1
            if count == _MAX_FRAMES:
                return


def _follows_call(memory: int, address: int) -> bool:
    """Return whether a call instruction ends at `address`."""
    before = _read(memory, address - 7, 7)
    if len(before) < 7:
        return False
    return before[2] == 0xE8 or any(
        before[-n] == 0xFF and before[-n + 1] >> 3 & 7 == 2 for n in (2, 3, 4, 6, 7)
    )


def _text(address: int, mappings: list[_Mapping]) -> str:
    """Format an address as `function (file)` or `file+0xoffset`; "" if no code is mapped there."""
    i = bisect.bisect_right(mappings, address, key=lambda one: one.begin) - 1
    if i < 0 or address >= mappings[i].end:
        return ""
    one = mappings[i]
    offset = address - one.begin + one.offset
    name = function_at(one.path, offset)
    file = one.path.rpartition("/")[2]
    return f"{name} ({file})" if name else f"{file}+{offset:#x}"


def _executable(maps: str) -> list[_Mapping]:
    found = []
    for line in maps.splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and "x" in fields[1] and fields[5].startswith("/"):
            begin, _, end = fields[0].partition("-")
            found.append(_Mapping(int(begin, 16), int(end, 16), int(fields[2], 16), fields[5]))
    return sorted(found, key=lambda one: one.begin)


def _read(memory: int, address: int, size: int) -> bytes:
    try:
        return os.pread(memory, size, address)
    except (OSError, OverflowError, ValueError):
        return b""
