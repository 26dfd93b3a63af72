"""A checkpoint's folder: numbered versions, of which the newest complete one counts.

    PATH/000002/rank_00000.bin  ...  manifest  commit
    PATH/.000003.tmp/           one that is being written, or was when its job died

[Note: when a version counts] A version is written under a hidden name, flushed, renamed to its
number, and given its commit mark last; it holds the manifest's own checksum. A version without a
right mark does not exist for a reader, so at every moment either the version before or the new one
is the newest complete one. Older versions go only after that, and lose their mark first.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from echelon.dist.checkpoint.disk import files
from echelon.dist.checkpoint.disk.manifest import Manifest, check_complete, decode, encode, merge
from echelon.errors import CheckpointError

MANIFEST = "manifest"
COMMIT = "commit"
_INDEX = "rank_{:05d}.index"
_FAILED = "rank_{:05d}.failed"
_VERSION = re.compile(r"\d{6,}")
_UNFINISHED = re.compile(r"\.\d{6,}\.tmp")
_SEAL_BYTES = 4


class Unfinished:
    """A version that is being written.

    Args:
        path: the hidden folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.final = path.with_name(path.name.removeprefix(".").removesuffix(".tmp"))

    @classmethod
    def create(cls, root: Path) -> Unfinished:
        """Make the folder of the version after all that are there; sweep what failed saves left."""
        files.make_folder(root)
        _sweep(root)
        numbers = [int(_digits(name)) for name in _names(root) if _digits(name)]
        path = root / f".{max(numbers, default=0) + 1:06d}.tmp"
        path.mkdir()
        return cls(path)

    def add_index(self, rank: int, part: Manifest) -> None:
        """Say that a rank's file is complete, and what is in it."""
        files.write_whole(self.path / _INDEX.format(rank), encode(part), sync=False)

    def add_failure(self, rank: int, reason: str) -> None:
        """Say that a rank could not write its part."""
        files.write_whole(self.path / _FAILED.format(rank), reason.encode(), sync=False)

    def failure(self) -> str | None:
        """Return what a rank said about its failure, if one did."""
        names = [name for name in self._names() if name.endswith(".failed")]
        if not names or names[0].startswith("."):
            return None
        rank = int(names[0].removeprefix("rank_").removesuffix(".failed"))
        reason = (self.path / names[0]).read_text(errors="replace")
        return f"rank {rank}: {reason}"

    def missing(self, world_size: int) -> list[int]:
        """Return the ranks whose part is not there yet."""
        names = set(self._names())
        return [rank for rank in range(world_size) if _INDEX.format(rank) not in names]

    def commit(self, world_size: int, keep: int) -> None:
        """Make this the newest complete version, then remove all but the last `keep`."""
        manifest = encode(self._merge(world_size))
        files.write_whole(self.path / MANIFEST, manifest, sync=True)
        files.remove(self.path / _INDEX.format(rank) for rank in range(world_size))
        files.sync_folder(self.path)
        files.rename(self.path, self.final)
        files.write_whole(self.final / COMMIT, manifest[-_SEAL_BYTES:], sync=True)
        files.sync_folder(self.final)
        prune(self.final.parent, keep)

    def _merge(self, world_size: int) -> Manifest:
        parts = []
        for rank in range(world_size):
            path = self.path / _INDEX.format(rank)
            try:
                parts.append(decode(path.read_bytes()))
            except ValueError as error:
                raise CheckpointError(f"{path}: {error}", path=path) from None
        return merge(parts)

    def _names(self) -> list[str]:
        return sorted(_names(self.path), reverse=True)


def is_committed(version: Path) -> bool:
    """Say whether a version has a commit mark that goes with its manifest."""
    try:
        mark = (version / COMMIT).read_bytes()
        manifest = (version / MANIFEST).read_bytes()
    except OSError:
        return False
    return len(mark) == _SEAL_BYTES and manifest[-_SEAL_BYTES:] == mark


def versions(root: Path) -> Sequence[Path]:
    """Return the complete versions of a checkpoint, the oldest first."""
    numbered = sorted((name for name in _names(root) if _VERSION.fullmatch(name)), key=int)
    return [root / name for name in numbered if is_committed(root / name)]


def newest(path: Path) -> Path:
    """Return the newest complete version of a checkpoint, or `path` itself if it is a version.

    Raises:
        CheckpointError: there is none.
    """
    if is_committed(path):
        return path
    found = versions(path)
    if found:
        return found[-1]
    if not path.exists():
        raise CheckpointError(f"{path}: no such checkpoint", path=path)
    raise CheckpointError(f"{path}: no complete checkpoint in it", path=path)


def read_manifest(version: Path) -> Manifest:
    """Read a version's manifest.

    Raises:
        CheckpointError: it cannot be read, or is not what was written.
    """
    path = version / MANIFEST
    try:
        manifest = decode(path.read_bytes())
        check_complete(manifest)
        return manifest
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}", path=path) from None
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}", path=path) from None


def prune(root: Path, keep: int) -> None:
    """Remove all but the last `keep` complete versions."""
    for version in versions(root)[:-keep]:
        files.remove([version / COMMIT])
        files.remove_folder(version)


def _sweep(root: Path) -> None:
    """Remove what saves left that did not complete."""
    for name in sorted(_names(root)):
        if _digits(name) and not is_committed(root / name):
            files.remove_folder(root / name)


def _names(folder: Path) -> list[str]:
    """Return a folder's entries; none if it is not there.

    Listing, rather than asking for a name, also makes NFS look at the folder again.
    """
    try:
        return [path.name for path in folder.iterdir()]
    except (FileNotFoundError, NotADirectoryError):
        return []


def _digits(name: str) -> str:
    """Return the number of a version, finished or not; empty for other names."""
    if _VERSION.fullmatch(name) or _UNFINISHED.fullmatch(name):
        return name.strip(".").removesuffix(".tmp")
    return ""
