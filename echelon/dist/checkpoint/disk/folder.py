"""Store a checkpoint as numbered versions in a folder.

By default, the newest complete version is loaded.

    PATH/000002/rank_00000.bin  ...  manifest  commit
    PATH/.000003-1f0c9a52e7d8b364.tmp/     being written, or left behind by a dead job
    PATH/.000001-77ab03c4d5e6f012.trash/   being removed

[Note: when a version counts] A version is written under a hidden name, flushed, renamed to its
number, and finally given its commit mark, which holds the manifest's checksum. A reader ignores
every version without a valid mark. Older versions are removed only after the new version is
complete, so a complete version always exists.

[Note: stale writers] A writer can outlive its save, for example if a write to the disk hangs past
the timeout. Every save therefore generates a token, which appears in the hidden folder's name, in
each rank's index and in the commit mark. A stale writer cannot damage another version, because it
writes only inside its own hidden folder. That folder is renamed before its files are removed, so
the stale writer's next file-system call fails.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from echelon.dist.checkpoint.disk import files, in_use
from echelon.dist.checkpoint.disk.damage import DamagedError
from echelon.dist.checkpoint.disk.manifest import (
    BLOCK_BYTES,
    Manifest,
    Range,
    StoredFile,
    check_complete,
    decode,
    dtype_bytes,
    encode,
    merge,
)
from echelon.dist.checkpoint.disk.step_names import step_folders
from echelon.errors import CheckpointError

MANIFEST = "manifest"
COMMIT = "commit"
INDEX_NAME = "rank_{:05d}.index"
FAILED_NAME = "rank_{:05d}.failed"
_VERSION = re.compile(r"\d{6,}")
_OWN_FILE = re.compile(r"\.?(rank_\d{5,}\.(bin|index|failed)|manifest|commit)(\.tmp)?")
_DATA = re.compile(r"rank_\d{5,}\.bin")
_HIDDEN = re.compile(r"\.(?P<number>\d{6,})(-[0-9a-f]+)?\.(?P<kind>tmp|trash)")
SEAL_BYTES = 4
TOKEN_BYTES = 8


class Unfinished:
    """A version that is being written.

    Args:
        path: the hidden folder of the version.
    """

    def __init__(self, path: Path) -> None:
        number, _, token = path.name.removeprefix(".").removesuffix(".tmp").partition("-")
        self.path = path
        self.final = path.with_name(number)
        self.token = token

    @classmethod
    def create(cls, root: Path) -> Unfinished:
        """Create the next version's folder and remove leftovers of failed saves.

        The new version's number is higher than that of every other version in the folder.
        """
        files.make_folder(root)
        number = max((_number(name) for name in _names(root)), default=0) + 1
        _sweep(root)
        path = root / f".{number:06d}-{secrets.token_hex(TOKEN_BYTES)}.tmp"
        path.mkdir()
        return cls(path)

    def is_seen(self) -> bool:
        """Return whether the folder that rank 0 created is visible to this rank."""
        if not self.path.is_dir():
            versions(self.path.parent)  # makes NFS look again
        return self.path.is_dir()

    @contextlib.contextmanager
    def local_folder(self) -> Iterator[Path]:
        """Yield the folder into which this rank writes its file: the version's hidden folder."""
        yield self.path

    def publish(self, file: Path, limit_s: float) -> None:  # noqa: ARG002 -- of the interface
        """Flush the directory entry of this rank's file to disk."""
        files.sync_folder(file.parent)

    def add_index(self, rank: int, part: Manifest) -> None:
        """Publish this rank's part of the manifest, after the rank's file is complete."""
        files.write_whole(self.path / INDEX_NAME.format(rank), encode(part), sync=False)

    def add_failure(self, rank: int, reason: str) -> None:
        """Report to all ranks that rank `rank` failed to write its part of the version."""
        files.write_whole(self.path / FAILED_NAME.format(rank), reason.encode(), sync=False)

    def failure(self) -> str | None:
        """Return the lowest failed rank and its error as text, or None if no rank has failed."""
        for name in sorted(_names(self.path)):
            if name.endswith(".failed") and not name.startswith("."):
                rank = int(name.removeprefix("rank_").removesuffix(".failed"))
                reason = (self.path / name).read_text(errors="replace")
                return f"rank {rank}: {reason}"
        return None

    def missing(self, world_size: int) -> list[int]:
        """Return the ranks whose parts of the version are not yet complete."""
        names = set(_names(self.path))
        return [rank for rank in range(world_size) if INDEX_NAME.format(rank) not in names]

    def is_committed(self) -> bool:
        """Return whether this save was committed."""
        return is_committed(self.final, self.token)

    def commit(self, world_size: int, keep: int) -> None:
        """Make this the newest complete version, then remove all but the newest `keep` versions.

        Raises:
            CheckpointError: a rank's file is missing, truncated or from another save.
            OSError: the disk failed. The version is valid only if its commit mark was written
                before the failure.
        """
        whole = self._merge(world_size)
        for file in whole.files.values():
            _require_size(self.path / file.name, file)
        manifest = encode(whole)
        files.write_whole(self.path / MANIFEST, manifest, sync=True)
        files.remove(self.path / INDEX_NAME.format(rank) for rank in range(world_size))
        files.sync_folder(self.path)
        files.rename(self.path, self.final)
        mark = manifest[-SEAL_BYTES:] + bytes.fromhex(self.token)
        files.write_whole(self.final / COMMIT, mark, sync=True)
        files.sync_folder(self.final)
        with contextlib.suppress(OSError):  # the next save removes what stays now
            prune(self.final.parent, keep)

    def discard(self) -> None:
        """Remove the files of a failed save, unless the save was already committed."""
        with contextlib.suppress(OSError):
            files.remove_folder(self.path)
            if not (self.final / COMMIT).exists() and self._is_mine(self.final):
                files.remove_folder(self.final)

    def _is_mine(self, version: Path) -> bool:
        try:
            return decode((version / MANIFEST).read_bytes()).save == self.token
        except (OSError, ValueError):
            return False

    def _merge(self, world_size: int) -> Manifest:
        parts = []
        for rank in range(world_size):
            path = self.path / INDEX_NAME.format(rank)
            try:
                part = decode(path.read_bytes())
            except ValueError as error:
                raise CheckpointError(f"{path}: {error}", path=path) from None
            if part.save != self.token:
                raise CheckpointError(f"{path}: the file belongs to another save", path=path)
            parts.append(part)
        return merge(parts, lambda one, other: are_equal(parts, one, other, self._read))

    def _read(self, name: str, offset: int, length: int) -> bytes:
        with (self.path / name).open("rb") as file:
            file.seek(offset)
            return file.read(length)


def are_equal(
    parts: Sequence[Manifest], one: Range, other: Range, read: Callable[[str, int, int], bytes]
) -> bool:
    """Return whether two ranks wrote identical bytes for the same elements of a tensor.

    Args:
        parts: the ranks' parts of the manifest, indexed by rank.
        one: the range that the first rank wrote.
        other: the range of the same length that the second rank wrote.
        read: a function that reads bytes from a rank's file, given the file's name, an offset and
            a length.
    """
    part = parts[one.file]
    size = next(
        dtype_bytes(tensor.dtype)
        for tensor in part.tensors.values()
        for known in tensor.ranges
        if 0 <= one.offset - known.offset < known.length * dtype_bytes(tensor.dtype)
    )
    names = [parts[of.file].files[of.file].name for of in (one, other)]
    for done in range(0, one.length * size, BLOCK_BYTES):
        step = min(one.length * size - done, BLOCK_BYTES)
        first = read(names[0], one.offset + done, step)
        if first != read(names[1], other.offset + done, step):
            return False
    return True


def is_committed(version: Path, token: str | None = None) -> bool:
    """Return whether a version has a commit mark that matches its manifest.

    Args:
        version: the version's folder.
        token: the token of the save to accept; None accepts any save.
    """
    try:
        mark = (version / COMMIT).read_bytes()
        with (version / MANIFEST).open("rb") as manifest:
            manifest.seek(-SEAL_BYTES, os.SEEK_END)
            seal = manifest.read()
    except OSError:
        return False
    if token is not None and mark[SEAL_BYTES:].hex() != token:
        return False
    return len(mark) >= SEAL_BYTES and mark[:SEAL_BYTES] == seal


def versions(root: Path) -> Sequence[Path]:
    """Return the complete versions of a checkpoint, oldest first."""
    return [version for version in _numbered(root) if is_committed(version)]


def marked(root: Path) -> Sequence[Path]:
    """Return the committed versions, including damaged ones, oldest first."""
    return [version for version in _numbered(root) if (version / COMMIT).exists()]


def candidates(path: Path) -> Sequence[Path]:
    """Return the versions to try to load, in order of preference.

    If `path` is itself a version, the result contains only `path`. In a folder with one checkpoint
    per step, the versions of the highest step come first.

    Raises:
        CheckpointError: no version was found.
    """
    if (path / COMMIT).exists():
        return [path]
    steps = step_folders(path)
    roots = [steps[step] for step in sorted(steps, reverse=True)]
    found = [
        version
        for root in [*roots, path]
        for version in reversed(marked(root))
        if (version / MANIFEST).exists()
    ]
    if found:
        return found
    if not path.exists():
        raise CheckpointError(f"{path}: no such checkpoint", path=path)
    raise CheckpointError(f"{path}: the folder does not contain a complete checkpoint", path=path)


def newest(path: Path) -> Path:
    """Return the newest complete version of a checkpoint, or `path` if it is a version itself.

    Raises:
        CheckpointError: no complete version exists.
    """
    return candidates(path)[0]


def read_manifest(version: Path) -> Manifest:
    """Read a version's manifest.

    Raises:
        DamagedError: the manifest cannot be read or was altered.
    """
    path = version / MANIFEST
    try:
        if not is_committed(version):
            raise ValueError("the manifest's checksum does not match the commit mark")
        manifest = decode(path.read_bytes())
        check_complete(manifest)
        return manifest
    except OSError as error:
        raise DamagedError(f"{path}: {error.strerror}", path=path) from None
    except ValueError as error:
        raise DamagedError(f"{path}: {error}", path=path) from None


def prune(root: Path, keep: int) -> None:
    """Remove versions that are older than the newest `keep` intact versions.

    A version counts as intact if its manifest is valid and its files have the right sizes. Versions
    that are being read are not removed.
    """
    whole = 0
    for version in reversed(marked(root)):
        if whole < keep:
            whole += _looks_whole(version)
        elif _is_own(version):
            with in_use.alone(version / COMMIT) as is_alone:
                if is_alone:
                    files.remove_folder(version)


def _looks_whole(version: Path) -> bool:
    return problem_of(version) is None


def problem_of(version: Path) -> str | None:
    """Return why a committed version cannot be loaded, or None if no problem was found.

    The check covers the manifest and the sizes of the files, but not the tensor data.
    """
    try:
        for file in read_manifest(version).files.values():
            _require_size(version / file.name, file)
    except (CheckpointError, OSError) as error:
        return str(error)
    return None


def is_of_a_save(path: Path) -> bool:
    """Return whether a file or folder in a checkpoint's folder was created by a save."""
    if _VERSION.fullmatch(path.name):
        return _is_own(path)
    return _HIDDEN.fullmatch(path.name) is not None and not path.is_symlink()


def _require_size(path: Path, stored: StoredFile) -> None:
    """Check a file's size without relying on the cache of a network file system.

    Raises:
        CheckpointError: the file is missing or has the wrong size.
    """
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
    except FileNotFoundError:
        raise CheckpointError(f"{path}: the file is missing", path=path) from None
    if size != stored.num_bytes:
        reason = f"the file has {size} bytes, but {stored.num_bytes} were written"
        raise CheckpointError(f"{path}: {reason}", path=path)


def _sweep(root: Path) -> None:
    """Remove the leftovers of incomplete saves and of interrupted removals."""
    for name in sorted(_names(root)):
        hidden = _HIDDEN.fullmatch(name)
        if hidden and hidden["kind"] == "trash":
            with contextlib.suppress(OSError):
                files.empty_folder(root / name)
        elif hidden:
            with contextlib.suppress(FileNotFoundError):  # its own writer renamed it just now
                files.remove_folder(root / name)
        elif _VERSION.fullmatch(name) and _was_never_committed(root / name):
            with contextlib.suppress(FileNotFoundError):
                _remove_uncommitted(root / name)


def _remove_uncommitted(version: Path) -> None:
    """Hide a version that has no commit mark, and remove it.

    If it turns out that a job committed the version just before it was hidden, restore it instead.
    """
    trash = files.set_aside(version)
    with contextlib.suppress(OSError):  # the next save tries again
        if (trash / COMMIT).exists():
            trash.rename(version)
        else:
            files.empty_folder(trash)


def _is_own(version: Path) -> bool:
    """Return whether a numbered folder was created by a save."""
    if version.is_symlink():
        return False
    names = _names(version)
    if any(map(_DATA.fullmatch, names)) and all(map(_OWN_FILE.fullmatch, names)):
        return True
    try:
        decode((version / MANIFEST).read_bytes())
    except (OSError, ValueError):
        return False
    return True


def _was_never_committed(version: Path) -> bool:
    """Return whether a version was created by a save but never committed.

    The result is False if this cannot be determined.
    """
    try:
        (version / COMMIT).read_bytes()
    except FileNotFoundError:
        return _is_own(version)
    except OSError:
        return False
    return False


def _numbered(root: Path) -> list[Path]:
    names = sorted((name for name in _names(root) if _VERSION.fullmatch(name)), key=int)
    return [root / name for name in names]


def _names(folder: Path) -> list[str]:
    """Return the names of a folder's entries, or [] if the folder does not exist."""
    try:
        return os.listdir(folder)  # noqa: PTH208 -- one call, which tests count
    except (FileNotFoundError, NotADirectoryError):
        return []


def _number(name: str) -> int:
    """Return the number in the name of a version's folder, or 0 for any other name."""
    hidden = _HIDDEN.fullmatch(name)
    if hidden:
        return int(hidden["number"])
    return int(name) if _VERSION.fullmatch(name) else 0
