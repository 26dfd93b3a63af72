"""Read one file of torch's flight recorder (pickle or JSON) into checked and typed fields.

Format versions 2.x are supported. Unknown keys are skipped, and missing keys get defaults. The rank
is taken from the file name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from echelon.analysis.sources.torch.plain_pickle import MAX_FILE_BYTES, load_plain
from echelon.errors import DumpFormatError

LOG_SUFFIXES = frozenset({".log", ".out", ".err", ".txt"})  # never a dump's
_RANK_WORD = re.compile(r"rank[-_.]?(\d{1,7})(?!\d)", re.IGNORECASE)
_LAST_NUMBER = re.compile(r"(?<!\d)(\d{1,7})\Z")
_EXTENSION = re.compile(r"(?:\.[A-Za-z]\w*)+\Z")
_VERSION = re.compile(r"(\d{1,6})\.(\d{1,6})\Z")
_NUMBER = re.compile(r"(?<!\d)\d{1,7}(?!\d)")
_COUNT = re.compile(r"-?\d{1,15}\Z")
_MAJOR = 2
_KEYS = frozenset({"version", "entries", "pg_config", "pg_status"})
_MAX_MEMBERS = 1 << 18


@dataclass(frozen=True, kw_only=True)
class TorchFile:
    """One rank's flight recorder dump."""

    path: Path
    rank: int
    version: tuple[int, int]
    members: Mapping[str, tuple[int, ...]]  # group name -> global ranks, as far as recorded
    entries: Sequence[Mapping[str, Any]]
    names: tuple[tuple[str, str], ...]  # name and description of the groups in `pg_config`
    status: Mapping[int, tuple[int, int]]  # local group number -> (last enqueued, last completed)
    warnings: tuple[str, ...] = ()


def rank_in_name(path: Path) -> int | None:
    """Return the rank in a file's name: the number after "rank", or the number at the end."""
    match = _RANK_WORD.search(path.name)
    if match is None:
        match = _LAST_NUMBER.search(_EXTENSION.sub("", path.name))
    return int(match[1]) if match else None


def read_torch_file(path: Path, rank: int) -> TorchFile:
    """Read one dump.

    Raises:
        DumpFormatError: the file is not a flight recorder dump, stored as a plain pickle or as
            JSON.
    """
    top = _load(path)
    if not isinstance(top, dict) or not any(key in top for key in _KEYS):
        raise DumpFormatError(f"{path} is not a flight recorder dump", path=path)
    version = _version(path, top.get("version"))
    entries = top.get("entries") or []
    if not isinstance(entries, list):
        raise DumpFormatError(f"{path}: the dump's entries are not a list", path=path)
    good = [entry for entry in entries if isinstance(entry, dict)]
    lost = len(entries) - len(good)
    return TorchFile(
        path=path,
        rank=rank,
        version=version,
        members=_members(top.get("pg_config")),
        entries=good,
        names=_names(top.get("pg_config")),
        status=_status(top.get("pg_status")),
        warnings=(f"{path}: {lost} entries cannot be read",) if lost else (),
    )


def _load(path: Path) -> Any:
    try:
        with path.open("rb") as file:
            head = file.read(1)
    except OSError as err:
        raise DumpFormatError(f"{path}: {err.strerror or err}", path=path) from err
    if not head:
        raise DumpFormatError(f"{path}: empty file", path=path)
    return load_plain(path) if head == b"\x80" else _load_json(path)


def _load_json(path: Path) -> Any:
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise DumpFormatError(
                f"{path}: the file is too large to be a dump (over {MAX_FILE_BYTES} B)", path=path
            )
        return json.loads(path.read_bytes())
    except (ValueError, RecursionError, MemoryError) as err:
        raise DumpFormatError(
            f"{path} is neither a pickle of plain data nor JSON", path=path
        ) from err
    except OSError as err:
        raise DumpFormatError(f"{path}: {err.strerror or err}", path=path) from err


def _version(path: Path, value: Any) -> tuple[int, int]:
    if value is None:
        return (_MAJOR, 0)
    match = _VERSION.match(value) if isinstance(value, str) else None
    if match is None:
        raise DumpFormatError(f"{path}: the dump does not state its format version", path=path)
    major, minor = int(match[1]), int(match[2])
    if major != _MAJOR:
        text = (
            f"{path}: flight recorder format {major}.{minor}, but this fr-analyze reads {_MAJOR}.x"
        )
        raise DumpFormatError(text, path=path)
    return major, minor


def _members(config: Any) -> dict[str, tuple[int, ...]]:
    """Read `pg_config`, without evaluating the string that contains the ranks."""
    found: dict[str, tuple[int, ...]] = {}
    for name, value in config.items() if isinstance(config, dict) else ():
        if isinstance(name, str) and isinstance(value, dict):
            found[name] = ranks_in(value.get("ranks"))
    return found


def _names(config: Any) -> tuple[tuple[str, str], ...]:
    values = config.items() if isinstance(config, dict) else ()
    return tuple(
        (name, str(value.get("desc", "")))
        for name, value in values
        if isinstance(name, str) and isinstance(value, dict)
    )


def _status(value: Any) -> dict[int, tuple[int, int]]:
    """Return each group's last enqueued and completed numbers from `pg_status`; -1 if missing."""
    found: dict[int, tuple[int, int]] = {}
    for key, counts in value.items() if isinstance(value, dict) else ():
        if isinstance(key, str) and _COUNT.match(key) and isinstance(counts, dict):
            pair = [counts.get(f"last_{what}_collective") for what in ("enqueued", "completed")]
            if all(_COUNT.match(str(number)) for number in pair):
                found[int(key)] = (int(str(pair[0])), int(str(pair[1])))
    return found


def ranks_in(value: Any) -> tuple[int, ...]:
    """Return the global ranks given as "[0, 1]" or as a list of numbers; () for any other value."""
    if isinstance(value, str):
        numbers = [int(number) for number in _NUMBER.findall(value)]
    elif isinstance(value, list):
        numbers = [number for number in value if type(number) is int]
    else:
        numbers = []
    in_order = dict.fromkeys(number for number in numbers if 0 <= number < _MAX_MEMBERS)
    return tuple(in_order)
