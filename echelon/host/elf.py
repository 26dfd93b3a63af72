"""Find the function at a given offset in an executable or shared library.

The names come from the symbol tables of 64-bit little-endian ELF files. Only regular files are
opened. Damaged files and files in other formats yield no names.
"""

from __future__ import annotations

import bisect
import functools
import stat
import struct
from pathlib import Path

_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SEGMENT = struct.Struct("<IIQQQQQQ")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_MAGIC = b"\x7fELF\x02\x01"
_LOAD, _SYMTAB, _DYNSYM, _FUNCTION = 1, 2, 11, 2
_MAX_TABLE_BYTES = 1 << 26


def function_at(path: str, offset: int) -> str:
    """Return the name of the function at byte `offset` in a file, or "" if it is unknown."""
    segments, starts, symbols = _tables(path)
    for at, address, size in segments:
        if at <= offset < at + size:
            place = offset - at + address
            i = bisect.bisect_right(starts, place) - 1
            if i >= 0 and place < starts[i] + max(symbols[i][0], 1):
                return symbols[i][1]
    return ""


Segments = list[tuple[int, int, int]]  # offset in the file, address, bytes in the file
Symbols = list[tuple[int, str]]  # bytes, name


@functools.lru_cache(maxsize=64)
def _tables(path: str) -> tuple[Segments, list[int], Symbols]:
    try:
        if not stat.S_ISREG(Path(path).stat().st_mode):
            return [], [], []
        with Path(path).open("rb") as file:
            return _read(file)
    except (OSError, ValueError, struct.error, IndexError):
        return [], [], []


def _read(file: object) -> tuple[Segments, list[int], Symbols]:
    def part(offset: int, size: int) -> bytes:
        if size > _MAX_TABLE_BYTES:
            raise ValueError("the ELF file has a table that is too large")
        file.seek(offset)  # type: ignore[attr-defined]
        return bytes(file.read(size))  # type: ignore[attr-defined]

    head = _HEADER.unpack(part(0, _HEADER.size))
    if not head[0].startswith(_MAGIC):
        raise ValueError("the file is not an ELF file")
    segments_at, sections_at, num_segments, num_sections = head[5], head[6], head[10], head[12]
    segments = [
        (offset, address, size)
        for kind, _, offset, address, _, size, _, _ in _SEGMENT.iter_unpack(
            part(segments_at, num_segments * _SEGMENT.size)
        )
        if kind == _LOAD
    ]
    sections = list(_SECTION.iter_unpack(part(sections_at, num_sections * _SECTION.size)))
    found: dict[int, tuple[int, str]] = {}
    for section in sections:
        if section[1] not in (_SYMTAB, _DYNSYM):
            continue
        texts = part(sections[section[6]][4], sections[section[6]][5])
        table = part(section[4], section[5] - section[5] % _SYMBOL.size)
        for name, info, _, _, value, size in _SYMBOL.iter_unpack(table):
            if info & 15 == _FUNCTION and value:
                text = texts[name : texts.index(b"\0", name)].decode("ascii", "replace")
                found[value] = (size, text)
    starts = sorted(found)
    return segments, starts, [found[start] for start in starts]
