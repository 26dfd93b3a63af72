"""Read the logs of a job as evidence of what each rank logged and how it ended.

The logs can have echelon's layout (`rank_3/attempt_0/stderr.log`) or torchrun's
(`attempt_0/3/stderr.log`). They can also be one file per rank (`slurm-99-3.out`, `rank3.log`),
or a single file with labeled lines. Only the newest attempt is read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from echelon.analysis.evidence.calls import Tables
from echelon.analysis.evidence.model import ROW, Evidence, Incident, RankEvidence
from echelon.analysis.sources.logs.endings import Ending, endings_in
from echelon.analysis.sources.logs.lines import by_rank, is_labeled, read_text
from echelon.analysis.sources.logs.messages import messages_in
from echelon.recorder.format.schema import HostFacts, Identity

FOREIGN = "logs"
_DEPTH = 5
_MAX_FILES = 1 << 16
_MAX_RANK = 1 << 18
_MAX_TOTAL_BYTES = 2 << 30
_TRACEBACK = "Traceback (most recent call last)"
_SUFFIXES = frozenset({".log", ".txt", ".out", ".err", ".stdout", ".stderr"})
_NAMES = frozenset({"stdout", "stderr"})
_RANK = re.compile(r"(?:^|[^a-z])rank[_-]?(\d{1,7})(?!\d)", re.IGNORECASE)
_ATTEMPT = re.compile(r"attempt_(\d{1,7})\Z")
_NUMBER = re.compile(r"\d{1,7}\Z")
_LAST_NUMBER = re.compile(r"(?:^|[._-])(\d{1,7})\Z")
_OWN_RANK = re.compile(r"^\[rank(\d{1,7})\]:", re.MULTILINE)
_NCCL = re.compile(r"\bcomm 0x[0-9a-f]{1,16} rank (\d{1,7}) nranks (\d{1,7})\b")
_NCCL_PID = re.compile(r"^[\w.-]{1,255}:(\d{1,10}):\d{1,10} \[\d{1,3}\] NCCL ", re.MULTILINE)


@dataclass(slots=True)
class _Logs:
    """The logs that have been read so far."""

    texts: dict[int, str] = field(default_factory=dict)  # by rank; -1: of no rank
    attempts: dict[int, int] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    num_bytes: int = 0

    def add(self, rank: int, attempt: int, text: str) -> None:
        if rank >= _MAX_RANK:
            rank = -1
        if attempt > self.attempts.get(rank, attempt):
            self.texts[rank] = ""
        if attempt >= self.attempts.get(rank, attempt):
            self.attempts[rank] = attempt
            self.texts[rank] = self.texts.get(rank, "") + text


def load_logs(path: Path) -> Evidence | None:
    """Load all logs under a folder, or a single log; return None if no log is found.

    A text file counts as a log only if it names a rank or contains a traceback or a known message.
    """
    logs = _Logs()
    for file in _files(path):
        if logs.num_bytes > _MAX_TOTAL_BYTES:
            logs.warnings.append(f"{path}: more than {_MAX_TOTAL_BYTES >> 30} GiB of logs")
            break
        try:
            text = read_text(file)
        except OSError as err:
            logs.warnings.append(f"{file}: {err.strerror or err}, left out")
            continue
        if text is not None:
            logs.num_bytes += len(text)
            _take(logs, path, file, text)
    if not any(logs.texts.values()):
        return None
    job = logs.texts.get(-1, "")
    is_job = any(rank >= 0 and text for rank, text in logs.texts.items()) or _TRACEBACK in job
    return _evidence(path, logs) if is_job or any(True for _ in messages_in(job)) else None


def _files(path: Path) -> Iterator[Path]:
    if path.is_file():
        yield path
        return
    level, seen = [path], 0
    for _ in range(_DEPTH + 1):
        below: list[Path] = []
        for folder in level:
            try:
                entries = sorted(folder.iterdir())
            except OSError:
                continue
            for entry in entries:
                seen += 1
                if seen > _MAX_FILES or entry.name.startswith(".") or entry.is_symlink():
                    continue
                if entry.is_dir():
                    below.append(entry)
                elif entry.is_file() and (
                    entry.suffix.lower() in _SUFFIXES or entry.name in _NAMES
                ):
                    yield entry
        level = below


def _take(logs: _Logs, top: Path, file: Path, text: str) -> None:
    parts = file.relative_to(top).parts if file != top else (file.name,)
    attempt = max((int(m[1]) for part in parts if (m := _ATTEMPT.match(part))), default=0)
    labeled = is_labeled(text)
    shares = by_rank(text, labeled=labeled)
    named = [rank for rank in shares if rank >= 0]
    rank = _rank_of(parts, text)
    if len(named) > 1 or labeled:
        for one, share in shares.items():
            logs.add(one, attempt, share)
    else:
        logs.add(rank, attempt, "".join(shares.values()) if rank >= 0 else shares.get(-1, ""))
        if rank < 0 and named:
            logs.add(named[0], attempt, shares[named[0]])


def _rank_of(parts: tuple[str, ...], text: str) -> int:
    """Return the rank that wrote a log file, or -1 if unknown.

    A rank named in the file's text takes precedence over a rank in its path.
    """
    said = {int(rank) for rank in _OWN_RANK.findall(text)}
    if len(said) == 1:
        return said.pop()
    for part in reversed(parts):
        if match := _RANK.search(part):
            return int(match[1])
    if len(parts) > 1 and _NUMBER.match(parts[-2]):
        return int(parts[-2])
    stem = parts[-1].split(".")[0] if parts[-1].count(".") == 1 else Path(parts[-1]).stem
    match = _LAST_NUMBER.search(stem)
    is_numbered = match is not None and not re.fullmatch(r"slurm-\d+", stem)
    return int(match[1]) if match is not None and is_numbered else -1


def _evidence(path: Path, logs: _Logs) -> Evidence:
    everything = "\n".join(logs.texts.values())
    told, first = endings_in(everything)
    by_rank_told = {ending.rank: ending for ending in told if ending.rank < _MAX_RANK}
    named = {rank for rank in logs.texts if rank >= 0} | set(by_rank_told)
    sizes = [int(size) for _, size in _NCCL.findall(everything) if int(size) <= _MAX_RANK]
    world_size = max([0, *(rank + 1 for rank in named), *sizes])
    order = [first] if first >= 0 else []
    ranks = {
        rank: _rank(rank, world_size, logs, by_rank_told.get(rank), is_first=rank == first)
        for rank in sorted(named)
    }
    return Evidence(
        world_size=world_size,
        ranks=ranks,
        groups=(),
        tables=Tables(),
        incident=Incident(world_size=world_size, ended=tuple(order)),
        origin=f"the logs in {path}" + (" and the job's log" if logs.texts.get(-1) else ""),
        foreign=FOREIGN,
        job_log=logs.texts.get(-1, ""),
        warnings=tuple(logs.warnings),
    )


def _rank(
    rank: int, world_size: int, logs: _Logs, ending: Ending | None, *, is_first: bool
) -> RankEvidence:
    text = logs.texts.get(rank, "")
    pid = _NCCL_PID.search(text)
    host = HostFacts(
        exit_code=None if ending is None else ending.code,
        exit_order=0 if is_first else -1,
        oom_kill=True if ending is not None and ending.is_memory else None,
        stderr_tail=text,
    )
    return RankEvidence(
        rank=rank,
        rows=np.zeros(0, ROW),
        identity=Identity(
            rank=rank,
            world_size=world_size,
            attempt=logs.attempts.get(rank, 0),
            pid=ending.pid if ending is not None and ending.pid else int(pid[1]) if pid else 0,
        ),
        host=host,
        has_ring=False,
    )
