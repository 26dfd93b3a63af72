"""Read evidence from a folder: an incident, `dump/`, a run directory, torch's dumps or logs.

A folder is recognized by its contents, and a file by its first bytes. The rank is taken from the
file name. An unreadable file causes a warning, and its rank becomes a suspect. A folder that is
still being written (`.incident_<k>.partial`) is ignored.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from echelon.analysis.evidence.model import Evidence, Incident
from echelon.analysis.sources.builder import EvidenceBuilder
from echelon.analysis.sources.collector import collector_off
from echelon.analysis.sources.torch.file import LOG_SUFFIXES
from echelon.errors import DumpFormatError
from echelon.recorder.read import read

_RANK_FILE = re.compile(r"rank_(\d{1,7})\Z")
_TORCH_FILE = re.compile(r"torch_rank_(\d{1,7})\Z")
_INCIDENT = re.compile(r"incident_(\d{1,9})\Z")
_RANK = re.compile(r"\d{1,7}\Z")
_ATTEMPT = re.compile(r"attempt_(\d{1,9})\Z")
_MAX_INCIDENT_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Place:
    """The input to be analyzed: the ranks' files, the incident, and a phrase that names the input.

    `torch` lists the dumps of torch's own recorder in the same folder.
    """

    files: tuple[tuple[int, Path], ...]
    words: str
    incident: Incident = field(default_factory=Incident)
    torch: tuple[tuple[int, Path], ...] = ()


def load(path: Path) -> Evidence:
    """Read all evidence in a folder and its subfolders.

    Raises:
        DumpFormatError: files exist, but none can be read.
        ValueError: the folder does not exist or has no content in a known format.
    """
    if not path.exists():
        raise ValueError(f"{path}: no such folder")
    place = find(path)
    if place is not None:
        return load_place(place)
    from echelon.analysis.sources.torch.folder import has_dumps, load_torch

    if not has_dumps(path):
        from echelon.analysis.sources.logs.folder import load_logs

        logs = load_logs(path)
        if logs is not None:
            return logs
        if (path / "incident.json").is_file():  # no node sent a black box in time
            incident = read_incident(path / "incident.json")
            return load_place(Place((), f"incident {path}, which has no black box", incident))
    return load_torch(path)


def find(path: Path) -> Place | None:
    """Choose which of echelon's own files to read, or return None if the folder contains none."""
    if path.is_file():
        is_foreign = _looks_foreign(path) or path.suffix in LOG_SUFFIXES
        return None if is_foreign else Place(((-1, path),), f"one file, {path}")
    if _ended_well_after_a_stall(path):
        rings = find_rings(path)
        if rings is not None:
            return replace(rings, words=f"{rings.words}; an earlier stall recovered")
    for candidate in (path / "dump", path):
        incident = _newest_incident(candidate)
        if incident is not None:
            return incident
    return _incident(path) or find_rings(path)


def load_place(place: Place) -> Evidence:
    """Read echelon's own files of one incident or attempt.

    Raises:
        DumpFormatError: none of the files can be read.
    """
    builder = EvidenceBuilder()
    unreadable: list[int] = []
    failure: DumpFormatError | None = None
    with collector_off():
        for rank, file in place.files:
            try:
                builder.add(read(file))
            except DumpFormatError as err:
                failure = err
                unreadable.append(rank)
                builder.warnings.append(str(err))
    if not builder.ranks and failure is not None:
        raise failure
    if place.torch:
        from echelon.analysis.sources.torch.beside import add_torch

        add_torch(builder, place.torch, place.incident.world_size)
    return builder.build(incident=place.incident, origin=place.words, unreadable=unreadable)


def _ended_well_after_a_stall(run_dir: Path) -> bool:
    """Return whether report.json shows that the job recovered from its last stall and succeeded."""
    told = _plain(run_dir / "report.json")
    incidents = told.get("incidents")
    if not isinstance(incidents, list) or not incidents or told.get("exit_code") != 0:
        return False
    last = incidents[-1]
    if not isinstance(last, dict) or told.get("ended_by") != "worker":
        return False
    return last.get("kind", "stall") == "stall" and last.get("recovered") is True


def _plain(path: Path) -> dict[str, Any]:
    """Read a small JSON object; return {} if the file is missing, malformed or too large."""
    try:
        if path.stat().st_size > _MAX_INCIDENT_BYTES:
            return {}
        values = json.loads(path.read_text("utf-8", "replace"))
    except (OSError, ValueError, RecursionError):
        return {}
    return values if isinstance(values, dict) else {}


def _newest_incident(folder: Path) -> Place | None:
    numbered = sorted(_numbered(folder, _INCIDENT), reverse=True)
    return next((place for _, path in numbered if (place := _incident(path)) is not None), None)


def _incident(folder: Path) -> Place | None:
    files = tuple(sorted(pair for pair in _numbered(folder, _RANK_FILE) if pair[1].is_file()))
    if not files or all(_looks_foreign(file) for _, file in files):
        return None
    torch = tuple(sorted(pair for pair in _numbered(folder, _TORCH_FILE) if pair[1].is_file()))
    incident = read_incident(folder / "incident.json")
    return Place(files, f"incident {folder}", incident, torch)


def find_rings(folder: Path) -> Place | None:
    """Return the rings of the newest attempt, or None if the folder has no rings."""
    newest: dict[int, tuple[int, Path]] = {}
    for rank, rank_folder in _numbered(folder, _RANK_FILE):
        for attempt, path in _numbered(rank_folder, _ATTEMPT):
            if (path / "ring").is_file() and attempt >= newest.get(rank, (-1, path))[0]:
                newest[rank] = (attempt, path / "ring")
    if not newest:
        return None
    last = max(attempt for attempt, _ in newest.values())
    files = tuple(sorted((rank, ring) for rank, (n, ring) in newest.items() if n == last))
    return Place(files, f"the final rings of attempt {last} in {folder}", Incident(attempt=last))


def read_incident(path: Path) -> Incident:
    """Read `incident.json`, using defaults for missing or malformed fields.

    If the file itself is missing or malformed, all fields have their defaults.
    """
    values = _plain(path)
    return Incident(
        kind=_text(values.get("kind")),
        number=_count(values.get("number")),
        attempt=_count(values.get("attempt")),
        world_size=_count(values.get("world_size")),
        reason=_text(values.get("reason")),
        is_early=values.get("early") is True,
        lost=_ranks(values.get("ranks_lost")),
        ended=_ended(values.get("ended")),
        absent=_reasons(values.get("ranks_absent")),
        probes=_texts(values.get("probes")),
        lost_earlier=_epochs(values.get("lost_earlier")),
        set_aside=_by_rank(values.get("set_aside")),
        epoch_since_ns=_count(values.get("epoch_since_mono_ns")),
        epoch_since_there_ns=_epochs(values.get("epoch_since_there_ns")),
    )


def _texts(value: Any) -> tuple[str, ...]:
    return tuple(one for one in value if isinstance(one, str)) if isinstance(value, list) else ()


def _ranks(value: Any) -> tuple[int, ...]:
    numbers = value if isinstance(value, list) else ()
    return tuple(sorted({n for n in numbers if isinstance(n, int) and _RANK.match(str(n))}))


def _ended(value: Any) -> tuple[int, ...]:
    """Parse `[[rank, code, order], ...]` and return the ranks, sorted by `order`."""
    rows = value if isinstance(value, list) else ()
    known = [
        (row[2], row[0])
        for row in rows
        if isinstance(row, list)
        and len(row) == 3  # the code is null if a node was lost
        and all(isinstance(number, int) for number in (row[0], row[2]))
    ]
    return tuple(rank for _, rank in sorted(known) if _RANK.match(str(rank)))


def _epochs(value: Any) -> dict[int, int]:
    """Parse `[[rank, number], ...]` like `_by_rank`, but also ignore entries whose number is 0."""
    return {rank: epoch for rank, epoch in _by_rank(value).items() if epoch}


def _by_rank(value: Any) -> dict[int, int]:
    """Parse `[[rank, number], ...]` into a dict keyed by rank, ignoring malformed entries."""
    rows = value if isinstance(value, list) else ()
    pairs = [row for row in rows if isinstance(row, list) and len(row) == 2]
    return {
        rank: number
        for rank, number in pairs
        if isinstance(rank, int) and _RANK.match(str(rank)) and type(number) is int and number >= 0
    }


def _reasons(value: Any) -> dict[int, str]:
    """Parse the reasons why absent ranks have no dump, keyed by rank; ignore malformed entries."""
    pairs = value.items() if isinstance(value, dict) else ()
    return {int(rank): _text(why) for rank, why in pairs if _RANK.match(rank) and _text(why)}


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _count(value: Any) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else 0


def _numbered(folder: Path, pattern: re.Pattern[str]) -> Iterator[tuple[int, Path]]:
    """Yield each folder entry whose name matches `pattern`, with the number in the name."""
    try:
        entries = list(folder.iterdir()) if folder.is_dir() else []
    except OSError:
        return
    for entry in entries:
        match = pattern.match(entry.name)
        if match:
            yield int(match[1]), entry


def _looks_foreign(path: Path) -> bool:
    """Return whether a file begins like a torch pickle or like JSON."""
    try:
        with path.open("rb") as file:
            head = file.read(2)
    except OSError:
        return False
    return head[:1] == b"{" or (
        head[:1] == b"\x80" and head[1:] in (b"\x02", b"\x03", b"\x04", b"\x05")
    )
