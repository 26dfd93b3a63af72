"""Read a folder of torch's flight recorder dumps as evidence.

A dump is recognized by its first bytes, and its rank is the number in the file name. Each host can
have its own subfolder. torch's group names are unique only within a process. If a dump does not
list a group's members, the members are inferred from the ranks that used the group, and the group
is marked as `vague`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from echelon.analysis.evidence.calls import Tables
from echelon.analysis.evidence.model import Evidence, RankEvidence
from echelon.analysis.sources.collector import collector_off
from echelon.analysis.sources.torch.counters import WORLD, Counters, descriptions, join_numbers
from echelon.analysis.sources.torch.file import LOG_SUFFIXES, rank_in_name, read_torch_file
from echelon.analysis.sources.torch.rows import TorchRows
from echelon.errors import DumpFormatError
from echelon.recorder.format.schema import Group, Identity, State

_DEPTH = 2  # a folder per host, and one more
_MAX_FILES = 1 << 20
_IGNORED = re.compile(r"(?:truth|incident|verdict|report|job)\.(?:json|txt)\Z")
_NAMELESS = frozenset({"", "undefined"})
_MAX_LOST = 8  # ranks that the sizes of the groups may add: at most one host's


def load_torch(path: Path) -> Evidence:
    """Load all dumps under a folder.

    Raises:
        DumpFormatError: dumps exist, but none can be read.
        ValueError: nothing in the folder looks like a dump.
    """
    chosen, doubles = _choose(path)
    if not chosen:
        raise ValueError(f"{path} contains no dumps in a known format")
    loader = TorchLoader()
    with collector_off():
        for rank, file in sorted(chosen.items()):
            loader.read(rank, file)
        if not loader.files:
            raise loader.failure or DumpFormatError(
                f"{path}: none of the dumps can be read", path=path
            )
        return loader.evidence(path, doubles)


def has_dumps(path: Path) -> bool:
    """Return whether a folder contains non-empty files that begin like dumps and are not logs."""
    files = _choose(path)[0].values()
    return any(file.suffix not in LOG_SUFFIXES and file.stat().st_size for file in files)


def _choose(path: Path) -> tuple[dict[int, Path], list[str]]:
    chosen: dict[int, Path] = {}
    warnings: list[str] = []
    for file in _files(path):
        rank = rank_in_name(file)
        if rank is None or _IGNORED.search(file.name) or not _looks_like_dump(file):
            continue
        if rank in chosen:
            warnings.append(f"{file}: a second dump of rank {rank}, left out")
            continue
        chosen[rank] = file
    return chosen, warnings


def _files(path: Path) -> Iterator[Path]:
    """Yield the files in a folder and its subfolders in a fixed order.

    Symbolic links to folders are not followed.
    """
    if path.is_file():
        yield path
        return
    level = [path]
    seen = 0
    for _ in range(_DEPTH + 1):
        below: list[Path] = []
        for folder in level:
            for entry in _entries(folder):
                seen += 1
                if seen > _MAX_FILES or entry.name.startswith("."):
                    continue
                if entry.is_dir() and not entry.is_symlink():
                    below.append(entry)
                elif entry.is_file():
                    yield entry
        level = below


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir()) if folder.is_dir() else []
    except OSError:
        return []  # a folder that cannot be listed


def _looks_like_dump(file: Path) -> bool:
    """Return whether a file might be one rank's dump, even if it is empty or truncated."""
    try:
        with file.open("rb") as opened:
            head = opened.read(1)
    except OSError:
        return True  # it exists but is not readable: its rank is a suspect
    return head in (b"", b"\x80", b"{")


class TorchLoader:
    """A loader of torch's dumps that retains only the rows and counters of each file."""

    def __init__(self, tables: Tables | None = None) -> None:
        self.tables = Tables() if tables is None else tables
        self.files: dict[int, TorchRank] = {}
        self.failure: DumpFormatError | None = None
        self._rows = TorchRows(self.tables)
        self._unreadable: list[int] = []
        self.warnings: list[str] = []

    def read(self, rank: int, path: Path) -> None:
        """Read a rank's file; if it is unreadable, add a warning."""
        try:
            file = read_torch_file(path, rank)
            read = self._rows.rows(str(path), file.entries, file.status)
        except DumpFormatError as err:
            self.failure = err
            self._unreadable.append(rank)
            self.warnings.append(str(err))
            return
        self.warnings += file.warnings
        status = file.status if read.counts_in_status else {}
        counters = Counters(tops=read.tops, status=status, names=file.names)
        self.files[rank] = TorchRank(rank, file.members, read.rows, counters, read.called_only)

    def settle(self, world_size: int = 0) -> TorchGroups:
        """Assign ranks to groups, and resolve the group and the global peer rank of each row."""
        groups = TorchGroups(self.files, self._rows.pairs, world_size)
        for read in self.files.values():
            groups.settle(read)
        groups.count(self.files.values())
        groups.reopen(self.files)
        return groups

    def evidence(self, path: Path, warnings: Sequence[str]) -> Evidence:
        """Assign ranks to groups and build the evidence."""
        groups = self.settle()
        ranks: dict[int, RankEvidence] = {}
        for rank, read in self.files.items():
            ranks[rank] = RankEvidence(
                rank=rank,
                rows=read.rows,
                identity=Identity(rank=rank, world_size=groups.world_size),
                entered=groups.entered.get(rank, {}),
                completed=groups.completed.get(rank, {}),
            )
        return Evidence(
            world_size=groups.world_size,
            ranks=ranks,
            groups=groups.groups,
            tables=self.tables,
            origin=f"torch's flight recorder dumps in {path}",
            foreign="torch",
            vague_groups=frozenset(groups.vague),
            is_world_inferred=groups.is_inferred,
            unreadable=tuple(sorted(self._unreadable)),
            warnings=(*warnings, *self.warnings),
        )


def _pairs_inside(rows: npt.NDArray[Any]) -> list[int]:
    """Return the (name, description) indices of the groups that have incomplete operations."""
    inside: list[int] = np.unique(rows["group"][rows["state"] != State.COMPLETED]).tolist()
    return inside


def _regular_size(
    pairs: Sequence[tuple[str, str]], recorded: Mapping[int, Sequence[int]], inside: set[int]
) -> int:
    """Infer the number of ranks from the sizes of the groups; return 0 if the number is unclear.

    Groups with the same description usually split the ranks evenly, so a group that is too small
    reveals a missing rank.
    """
    shapes: dict[str, dict[int, Sequence[int]]] = {}
    for pair, ranks in recorded.items():
        if pairs[pair][1] != WORLD:
            shapes.setdefault(pairs[pair][1], {})[pair] = ranks
    sizes: set[int] = set()
    for groups in shapes.values():
        members = [rank for ranks in groups.values() for rank in ranks]
        largest = max(map(len, groups.values()))
        short = {pair for pair, ranks in groups.items() if len(ranks) < largest}
        if len(groups) < 2 or len(members) > len(set(members)) or not short <= inside:
            return 0
        sizes.add(len(groups) * largest)
    seen = len({rank for ranks in recorded.values() for rank in ranks})
    size = max(sizes, default=0)
    return size if len(sizes) == 1 and size - seen <= _MAX_LOST else 0


@dataclass(frozen=True, slots=True)
class TorchRank:
    """The part of a rank's file that the loader retains."""

    rank: int
    members: Mapping[str, tuple[int, ...]]
    rows: npt.NDArray[Any]
    counters: Counters
    called_only: frozenset[int] = frozenset()  # pairs without a known completion of any operation


class TorchGroups:
    """The groups that appear in any of the files, identified by name, description and members."""

    def __init__(
        self, files: Mapping[int, TorchRank], pairs: Sequence[tuple[str, str]], world_size: int = 0
    ) -> None:
        self.groups: list[Group] = []
        self.vague: set[int] = set()
        self.entered: dict[int, dict[int, int]] = {}  # rank -> group -> collectives
        self.completed: dict[int, dict[int, int]] = {}
        self._pairs = pairs
        self._index: dict[tuple[str, str, tuple[int, ...]], int] = {}
        self._recorded: dict[int, list[int]] = {}
        self._configs: dict[str, list[tuple[int, ...]]] = {}
        world: set[int] = set(files)
        for rank, read in files.items():
            for pair in np.unique(read.rows["group"]).tolist():
                self._recorded.setdefault(pair, []).append(rank)
            for name, ranks in read.members.items():
                world.update(ranks)
                if ranks and ranks not in self._configs.setdefault(name, []):
                    self._configs[name].append(ranks)
        self.world_size = max(max(world, default=-1) + 1, world_size)
        named = (ranks for read in files.values() for ranks in read.members.values())
        self.is_inferred = not any(named)
        if self.is_inferred:
            inside = {pair for read in files.values() for pair in _pairs_inside(read.rows)}
            self.world_size = max(self.world_size, _regular_size(pairs, self._recorded, inside))

    def settle(self, read: TorchRank) -> None:
        """Resolve the groups and peers in a rank's rows.

        The index of each (name, description) pair is replaced with the number of the group, and
        each local peer is replaced with a global rank.
        """
        rows = read.rows
        for pair in np.unique(rows["group"]).tolist():
            mine = rows["group"] == pair
            number = self._number(read, pair)
            ranks = np.array([*self.groups[number].ranks, -1], np.int64)
            local = rows["peer"][mine]
            local = np.where((local >= 0) & (local < len(ranks) - 1), local, len(ranks) - 1)
            rows["peer"][mine] = ranks[local]
            rows["group"][mine] = -2 - number  # marked, so that it is not mistaken for a pair
        rows["group"] = -2 - rows["group"]

    def count(self, files: Iterable[TorchRank]) -> None:
        """Count the collectives that each rank entered and (if known) completed in each group."""
        files = list(files)
        pairs = list(self._pairs)
        described = descriptions((read.counters for read in files), pairs)
        with_messages: set[int] = set()
        tops: list[tuple[int, int, int]] = []
        for read in files:
            for pair, top in read.counters.tops.items():
                number = self._number(read, pair)
                tops.append((read.rank, number, top.collectives))
                if top.messages:
                    with_messages.add(number)
        for rank, number, collectives in tops:
            self.entered.setdefault(rank, {})[number] = collectives
        for read in files:
            if not all(name for name, _ in read.counters.names):
                continue  # Gloo's counter also counts messages, which it does not record
            mine = self.entered.setdefault(read.rank, {})
            for local, (name, desc) in join_numbers(read.counters, described, pairs).items():
                found = self._counted(read, name, desc, with_messages)
                if found is None or found in with_messages or local not in read.counters.status:
                    continue
                last, completed = read.counters.status[local]
                mine[found] = max(mine.get(found, 0), last)
                self.completed.setdefault(read.rank, {})[found] = max(completed, 0)

    def reopen(self, files: Mapping[int, TorchRank]) -> None:
        """Mark collectives whose state is unknown as pending if some member has not called them.

        A collective that all members have called counts as completed. If a member's dump is
        missing, only the group's last collective counts as pending.
        """
        for read in files.values():
            for number in {self._number(read, pair) for pair in read.called_only}:
                members = self.groups[number].ranks
                called = [self.entered.get(rank, {}).get(number, 0) for rank in members]
                if any(rank not in files for rank in members):
                    called = [max(called) - 1]  # they may be waiting in their last one
                rows = read.rows
                mine = (rows["group"] == number) & (rows["sequence"] > min(called, default=0))
                rows["state"][mine] = State.STARTED

    def _number(self, read: TorchRank, pair: int) -> int:
        name, desc = self._pairs[pair]
        members, vague = self._members(read, pair)
        is_new = (name, desc, members) not in self._index
        known = self._known(name, desc, members)
        if is_new and vague:
            self.vague.add(known)
        return known

    def _counted(
        self, read: TorchRank, name: str, desc: str, with_messages: set[int]
    ) -> int | None:
        """Return the number of the group to which a counter belongs, or None if unclear."""
        members = read.members.get(name, ())
        found = self._index.get((name, desc, members))
        if found is None and desc == WORLD and members and with_messages:
            return self._known(name, desc, members)
        return found

    def _known(self, name: str, desc: str, members: tuple[int, ...]) -> int:
        """Return the number of a group, adding the group if it is new."""
        key = (name, desc, members)
        known = self._index.get(key)
        if known is None:
            known = self._index[key] = len(self.groups)
            self.groups.append(Group(self._label(name, desc, members), members))
        return known

    def _members(self, read: TorchRank, pair: int) -> tuple[tuple[int, ...], bool]:
        name, desc = self._pairs[pair]
        own = read.members.get(name, ())
        if own:
            return own, False
        for ranks in self._configs.get(name, []):
            if read.rank in ranks:
                return ranks, False
        if desc == WORLD:
            return tuple(range(self.world_size)), False
        return tuple(self._recorded.get(pair, ())), True

    def _label(self, name: str, desc: str, members: tuple[int, ...]) -> str:
        label = name if desc in _NAMELESS else desc
        taken = any(g.name == label and g.ranks == members for g in self.groups)
        return f"{label} ({name})" if taken else label
