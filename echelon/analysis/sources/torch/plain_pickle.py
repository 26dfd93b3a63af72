"""Read pickles that contain only plain data.

A pickle can make Python's unpickler call arbitrary functions. Each file is therefore scanned first,
opcode by opcode. Only opcodes that build dicts, lists, tuples, strings and numbers are accepted. As
a second safeguard, the unpickler cannot look up classes.

The scan also limits the memory that a file can make this process allocate: strings must lie within
the file, and memo numbers must be plausible for the file's size.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import re
from pathlib import Path
from typing import Any, NoReturn

from echelon.errors import DumpFormatError

MAX_FILE_BYTES = 1 << 30
_LONGS = b"|".join(b"\\x8a" + re.escape(bytes([n])) + b"." * n for n in range(9))
_FIXED = (
    rb"[()}\]aesutN\x85-\x89\x94]"  # marks, containers, None, booleans, memoize
    rb"|[Khq\x80]."  # one byte: small integers, memo, protocol
    rb"|M..|[Jj]....|G.{8}|\x95.{8}|" + _LONGS
)
_SHORT = b"|".join(re.escape(bytes([n])) + b"\\x00\\x00\\x00.{%d}" % n for n in range(64))
_FIXED += rb"|X(?:" + _SHORT + rb")"
_SMALL_FILE = 1 << 16
_MEMO_SMALL = rb"|r..\x00\x00"
_MEMO_LARGE = rb"|r...\x00"
_RUN_SMALL = re.compile(b"(?:" + _FIXED + _MEMO_SMALL + b"){1,2000}", re.DOTALL)
_RUN_LARGE = re.compile(b"(?:" + _FIXED + _MEMO_LARGE + b"){1,2000}", re.DOTALL)
_STOP, _UNICODE, _SHORT_UNICODE = b".X\x8c"
_NAMES = {ord(op.code): op.name for op in pickletools.opcodes}


class _NothingUnpickler(pickle.Unpickler):
    """An unpickler that refuses to load classes or functions."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"refusing to unpickle: the file references {module}.{name}")

    def persistent_load(self, _: Any) -> NoReturn:
        raise pickle.UnpicklingError("refusing to unpickle: the file contains a persistent ID")


def load_plain(path: Path) -> Any:
    """Read a pickle of plain data.

    Raises:
        DumpFormatError: the file contains more than plain data, is damaged, or is too large.
    """
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise DumpFormatError(
                f"{path}: the file is too large to be a dump (over {MAX_FILE_BYTES} B)", path=path
            )
        data = path.read_bytes()
    except OSError as err:
        raise DumpFormatError(f"{path}: {err.strerror or err}", path=path) from err
    problem = refuse(data)
    if problem:
        raise DumpFormatError(f"{path}: {problem}", path=path)
    try:
        # The unpickler reads ahead in a buffered reader; from plain bytes it reads little at a
        # time.
        return _NothingUnpickler(io.BufferedReader(io.BytesIO(data), len(data) + 1)).load()
    except Exception as err:
        raise DumpFormatError(f"{path}: damaged pickle ({type(err).__name__})", path=path) from err


def refuse(data: bytes) -> str:
    """Explain why a pickle is rejected; return "" if it contains only plain data."""
    run = _RUN_SMALL if len(data) < _SMALL_FILE else _RUN_LARGE
    at, end = 0, len(data)
    while at < end:
        match = run.match(data, at)
        if match is not None:
            at = match.end()
            continue
        code = data[at]
        if code == _STOP:
            return ""
        if code == _UNICODE:
            at += 5 + int.from_bytes(data[at + 1 : at + 5], "little")
        elif code == _SHORT_UNICODE:
            at += 2 + int.from_bytes(data[at + 1 : at + 2], "little")
        else:
            return f"not plain data: opcode {_NAMES.get(code, hex(code))} at byte {at} is refused"
    return "the pickle is cut off"
