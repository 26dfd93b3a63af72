"""A folder of torch's flight recorder dumps as evidence.

Files are told from other files by what they begin with, and their ranks by the number in the name;
they may lie in a folder per host. torch keys groups by a name that is only unique within a process,
writes members as a string, and with Gloo often not at all: then the members are those who recorded
something in the group, and such a group is marked as vague.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from echelon.analysis.evidence import Evidence, RankEvidence, Tables
from echelon.analysis.torch_file import TorchFile, rank_in_name, read_torch_file
from echelon.analysis.torch_rows import TorchRows
from echelon.errors import DumpFormatError
from echelon.recorder.schema import Group, Identity

_DEPTH = 2  # a folder per host, and one more
_MAX_FILES = 1 << 20
_IGNORED = re.compile(r"(?:truth|incident|verdict|report|job)\.(?:json|txt)\Z")
_DEFAULT = "default_pg"
_NAMELESS = frozenset({"", "undefined"})


def load_torch(path: Path) -> Evidence:
    """Read all dumps below a folder.

    Raises:
        DumpFormatError: dumps are there and none of them can be read.
        ValueError: nothing there looks like a dump.
    """
    chosen, doubles = _choose(path)
    if not chosen:
        raise ValueError(f"{path}: holds no dump of a known kind")
    loader = _Loader()
    with _no_collector():
        for rank, file in sorted(chosen.items()):
            loader.read(rank, file)
        if not loader.files:
            raise loader.failure or DumpFormatError(f"{path}: no dump can be read", path=path)
        return loader.evidence(path, doubles)


@contextmanager
def _no_collector() -> Iterator[None]:
    """Switch the cycle collector off: it would walk millions of live objects again and again."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


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
    """Yield the files of a folder and of those in it, in a fixed order, links left alone."""
    if path.is_file():
        yield path
        return
    level = [path]
    seen = 0
    for _ in range(_DEPTH + 1):
        below: list[Path] = []
        for folder in level:
            for entry in sorted(folder.iterdir()):
                seen += 1
                if seen > _MAX_FILES or entry.name.startswith("."):
                    continue
                if entry.is_dir() and not entry.is_symlink():
                    below.append(entry)
                elif entry.is_file():
                    yield entry
        level = below


def _looks_like_dump(file: Path) -> bool:
    """Tell whether a file may be a rank's dump: it begins like one, or is empty or cut off."""
    try:
        with file.open("rb") as opened:
            head = opened.read(1)
    except OSError:
        return True  # there, and not readable: its rank is a suspect
    return head in (b"", b"\x80", b"{")


@dataclass
class _Loader:
    tables: Tables = field(default_factory=Tables)
    files: dict[int, TorchFile] = field(default_factory=dict)
    unreadable: list[int] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    failure: DumpFormatError | None = None

    def read(self, rank: int, path: Path) -> None:
        try:
            self.files[rank] = read_torch_file(path, rank)
            self.warnings += self.files[rank].warnings
        except DumpFormatError as err:
            self._refuse(rank, err)

    def _refuse(self, rank: int, err: DumpFormatError) -> None:
        self.files.pop(rank, None)
        self.failure = err
        self.unreadable.append(rank)
        self.warnings.append(str(err))

    def evidence(self, path: Path, warnings: Sequence[str]) -> Evidence:
        groups = _Groups(self.files)
        rows = TorchRows(self.tables)
        ranks: dict[int, RankEvidence] = {}
        foreign = "torch"
        for rank, file in list(self.files.items()):
            numbers = groups.of_rank(file)
            try:
                table = rows.rows(str(file.path), file.entries, numbers.number, numbers.peer)
            except DumpFormatError as err:
                self._refuse(rank, err)
                continue
            identity = Identity(rank=rank, world_size=groups.world_size)
            ranks[rank] = RankEvidence(
                rank=rank, rows=table, identity=identity, num_unrecorded=_unrecorded(file)
            )
        if not ranks:
            assert self.failure is not None
            raise self.failure
        return Evidence(
            world_size=groups.world_size,
            ranks=ranks,
            groups=groups.groups,
            tables=self.tables,
            origin=f"torch's flight recorder dumps in {path}",
            foreign=foreign,
            vague_groups=frozenset(groups.vague),
            unreadable=tuple(sorted(self.unreadable)),
            warnings=(*warnings, *self.warnings),
        )


class _Groups:
    """All groups of all files; a group is its name, its description and its members."""

    def __init__(self, files: Mapping[int, TorchFile]) -> None:
        self.groups: list[Group] = []
        self.vague: set[int] = set()
        self._index: dict[tuple[str, str, tuple[int, ...]], int] = {}
        self._recorded = _who_recorded(files)
        self._configs: dict[str, list[tuple[int, ...]]] = {}
        world: set[int] = set(files)
        for file in files.values():
            for name, ranks in file.members.items():
                world.update(ranks)
                if ranks and ranks not in self._configs.setdefault(name, []):
                    self._configs[name].append(ranks)
        self.world_size = max(world, default=-1) + 1

    def of_rank(self, file: TorchFile) -> _RankGroups:
        return _RankGroups(self, file)

    def number(self, rank: int, own: tuple[int, ...], name: str, desc: str) -> int:
        """Return the number of the group that a rank calls (name, desc)."""
        members, vague = self._members(rank, own, name, desc)
        key = (name, desc, members)
        known = self._index.get(key)
        if known is None:
            known = self._index[key] = len(self.groups)
            self.groups.append(Group(self._label(name, desc, members), members))
            if vague:
                self.vague.add(known)
        return known

    def _members(
        self, rank: int, own: tuple[int, ...], name: str, desc: str
    ) -> tuple[tuple[int, ...], bool]:
        if own:
            return own, False
        for ranks in self._configs.get(name, []):
            if rank in ranks:
                return ranks, False
        if desc == _DEFAULT:
            return tuple(range(self.world_size)), False
        return tuple(sorted(self._recorded.get((name, desc), ()))), True

    def _label(self, name: str, desc: str, members: tuple[int, ...]) -> str:
        label = name if desc in _NAMELESS else desc
        taken = any(g.name == label and g.ranks == members for g in self.groups)
        return f"{label} ({name})" if taken else label


class _RankGroups:
    """The groups as one rank names them."""

    def __init__(self, groups: _Groups, file: TorchFile) -> None:
        self._groups = groups
        self._file = file

    def number(self, name: str, desc: str) -> int:
        """Return the group's number."""
        own = self._file.members.get(name, ())
        return self._groups.number(self._file.rank, own, name, desc)

    def peer(self, group: int, local: int) -> int:
        """Return the global rank of a group-local one."""
        members = self._groups.groups[group].ranks
        return members[local] if 0 <= local < len(members) else -1


def _unrecorded(file: TorchFile) -> int:
    """Count the operations begun after a group's last entry that only `pg_status` knows of.

    Gloo records no send and no receive, but counts them.
    """
    last: dict[int, int] = {}
    for entry in file.entries:
        group, number = entry.get("pg_id"), entry.get("op_id")
        if type(group) is int and type(number) is int:
            last[group] = max(number, last.get(group, 0))
    return sum(max(0, file.enqueued.get(group, 0) - number) for group, number in last.items())


def _who_recorded(files: Mapping[int, TorchFile]) -> dict[tuple[str, str], set[int]]:
    recorded: dict[tuple[str, str], set[int]] = {}
    for rank, file in files.items():
        for entry in file.entries:
            pair = entry.get("process_group")
            if isinstance(pair, (tuple, list)) and len(pair) == 2:
                recorded.setdefault((str(pair[0]), str(pair[1])), set()).add(rank)
    return recorded
