"""Store a checkpoint as numbered versions in an object store.

ADDRESS/000002-77ab03c4d5e6f012/rank_00000.bin ... manifest, commit

A version's name contains the token of its save, so two saves never write the same object. The
commit mark is written last and removed first.
"""

from __future__ import annotations

import contextlib
import re
import secrets
import tempfile
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path

from echelon.dist.checkpoint.disk.damage import DamagedError
from echelon.dist.checkpoint.disk.folder import (
    COMMIT,
    FAILED_NAME,
    INDEX_NAME,
    MANIFEST,
    SEAL_BYTES,
    TOKEN_BYTES,
    are_equal,
)
from echelon.dist.checkpoint.disk.manifest import (
    Manifest,
    StoredFile,
    check_complete,
    decode,
    encode,
    merge,
)
from echelon.dist.checkpoint.disk.rank_file import RankFileReader
from echelon.dist.checkpoint.disk.source import Version
from echelon.dist.checkpoint.disk.step_names import step_of
from echelon.dist.checkpoint.remote.store import Remote
from echelon.errors import CheckpointError

_VERSION = re.compile(rf"(\d{{6,}})-[0-9a-f]{{{2 * TOKEN_BYTES}}}")
_BEGUN = "begun"
_WINDOW_BYTES = 16 << 20  # read at once: a request costs tens of milliseconds


class RemoteUnfinished:
    """A version that is being written, with the interface of `disk.folder.Unfinished`.

    Args:
        path: the version's folder.
    """

    def __init__(self, path: Remote) -> None:
        self.path = self.final = path
        self.token = path.name.partition("-")[2]

    @classmethod
    def create(cls, root: Remote) -> RemoteUnfinished:
        """Create the next version, numbered one higher than the highest existing number."""
        numbers = [int(found[1]) for name in root.sizes() if (found := _VERSION.fullmatch(name))]
        path = root / f"{max(numbers, default=0) + 1:06d}-{secrets.token_hex(TOKEN_BYTES)}"
        path.write(_BEGUN, b"1")
        return cls(path)

    def is_seen(self) -> bool:
        """Return whether the version that rank 0 created is visible to this rank."""
        return _BEGUN in self.path.sizes()

    @contextlib.contextmanager
    def local_folder(self) -> Iterator[Path]:
        """Yield a temporary local folder for the rank's file, which `publish` uploads."""
        with tempfile.TemporaryDirectory(prefix="echelon-checkpoint-") as folder:
            yield Path(folder)

    def publish(self, file: Path, limit_s: float) -> None:
        """Upload the rank's file.

        Raises:
            OSError: the file was not uploaded within the time limit.
        """
        self.path.upload(file, limit_s)

    def add_index(self, rank: int, part: Manifest) -> None:
        """Publish this rank's part of the manifest. The rank's file must already be complete."""
        self.path.write(INDEX_NAME.format(rank), encode(part))

    def add_failure(self, rank: int, reason: str) -> None:
        """Report to all ranks that rank `rank` failed to write its part of the version."""
        self.path.write(FAILED_NAME.format(rank), reason.encode())

    def failure(self) -> str | None:
        """Return the lowest failed rank and its error as text, or None if no rank has failed."""
        for name in sorted(self.path.sizes()):
            if name.endswith(".failed"):
                rank = int(name.removeprefix("rank_").removesuffix(".failed"))
                return f"rank {rank}: {self.path.read(name).decode(errors='replace')}"
        return None

    def missing(self, world_size: int) -> list[int]:
        """Return the ranks whose parts are not yet complete."""
        names = self.path.sizes()
        return [rank for rank in range(world_size) if INDEX_NAME.format(rank) not in names]

    def is_committed(self) -> bool:
        """Return whether this save was committed."""
        return COMMIT in self.path.sizes()

    def commit(self, world_size: int, keep: int) -> None:
        """Make this the newest complete version, then remove all but the newest `keep` versions.

        Raises:
            CheckpointError: a rank's file is missing, truncated or from another save.
            OSError: the object store failed. The version is valid only if its commit mark was
                written before the failure.
        """
        parts = [self._part(rank) for rank in range(world_size)]
        whole = merge(parts, lambda one, other: are_equal(parts, one, other, self._read))
        problem = _wrong_size(self.path, whole)
        if problem is not None:
            raise CheckpointError(problem, path=str(self.path))
        manifest = encode(whole)
        self.path.write(MANIFEST, manifest)
        self.path.write(COMMIT, manifest[-SEAL_BYTES:] + bytes.fromhex(self.token))
        with contextlib.suppress(OSError):  # the next save removes what stays now
            self.path.remove([INDEX_NAME.format(rank) for rank in range(world_size)] + [_BEGUN])
            prune(self.path.parent, self.path, keep)

    def discard(self) -> None:
        """Remove the objects of a failed save, unless the save was already committed."""
        with contextlib.suppress(OSError):
            if not self.is_committed():
                remove(self.path)

    def _part(self, rank: int) -> Manifest:
        name = INDEX_NAME.format(rank)
        try:
            part = decode(self.path.read(name))
        except ValueError as error:
            raise CheckpointError(f"{self.path}/{name}: {error}", path=str(self.path)) from None
        if part.save != self.token:
            reason = f"{self.path}/{name}: the file belongs to another save"
            raise CheckpointError(reason, path=str(self.path))
        return part

    def _read(self, name: str, offset: int, length: int) -> bytes:
        return self.path.read(name, offset, offset + length)


def versions(root: Remote) -> list[Remote]:
    """Return the versions of a checkpoint, committed or not, oldest first."""
    names = [name for name in root.sizes() if _VERSION.fullmatch(name)]
    return [root / name for name in sorted(names, key=lambda name: int(name.partition("-")[0]))]


def marked(root: Remote) -> list[Remote]:
    """Return the committed versions, including damaged ones, oldest first."""
    return [version for version in versions(root) if COMMIT in version.sizes()]


def candidates(place: Remote) -> Sequence[Remote]:
    """Return the versions to try to load, in order of preference.

    If `place` is itself a version, the result contains only `place`.

    Raises:
        CheckpointError: no version was found.
    """
    names = place.sizes()
    if COMMIT in names:
        return [place]
    steps = {step: place / name for name in names if (step := step_of(name)) is not None}
    roots = [steps[step] for step in sorted(steps, reverse=True)]
    found = [version for root in [*roots, place] for version in reversed(marked(root))]
    if not found:
        raise CheckpointError(
            f"{place}: the folder does not contain a complete checkpoint", path=str(place)
        )
    return found


def read_manifest(version: Remote) -> Manifest:
    """Read a version's manifest.

    Raises:
        DamagedError: the manifest is missing or was altered.
        OSError: the object store failed.
    """
    try:
        content, mark = version.read(MANIFEST), version.read(COMMIT)
        if not mark[:SEAL_BYTES] or mark[:SEAL_BYTES] != content[-SEAL_BYTES:]:
            raise ValueError("the manifest's checksum does not match the commit mark")
        manifest = decode(content)
        check_complete(manifest)
        return manifest
    except FileNotFoundError:
        raise DamagedError(
            f"{version}: the checkpoint is being removed", path=str(version)
        ) from None
    except ValueError as error:
        raise DamagedError(f"{version}/{MANIFEST}: {error}", path=str(version)) from None


def problem_of(version: Remote) -> str | None:
    """Return why a committed version cannot be loaded, or None if no problem was found.

    The check covers the manifest and the sizes of the files, but not the tensor data.
    """
    try:
        return _wrong_size(version, read_manifest(version))
    except (CheckpointError, OSError) as error:
        return str(error)


def prune(root: Remote, newest: Remote, keep: int) -> None:
    """Remove incomplete versions and all versions older than the newest `keep` intact versions."""
    whole = 0
    for version in reversed(versions(root)):
        if COMMIT in version.sizes() and whole < keep:
            whole += problem_of(version) is None
        elif version != newest:
            remove(version)


def remove(version: Remote) -> None:
    """Remove a version, beginning with its commit mark.

    Raises:
        OSError: the object store failed.
    """
    names = sorted(version.sizes(), key=lambda name: name != COMMIT)
    version.remove(names)
    version.remove_folder()


def _wrong_size(version: Remote, manifest: Manifest) -> str | None:
    sizes = version.sizes()
    for file in manifest.files.values():
        size = sizes.get(file.name)
        if size is None:
            return f"{version}/{file.name}: missing"
        if size != file.num_bytes:
            return (
                f"{version}/{file.name}: the file has {size} bytes, but {file.num_bytes} "
                "were written"
            )
    return None


class RemoteVersion(Version):
    """A complete version in an object store.

    Raises:
        CheckpointError: no version exists at `place`, or the version is damaged.
    """

    def __init__(self, place: Remote) -> None:
        self._place = candidates(place)[0]
        self.path = self._place  # type: ignore[assignment]  # for messages
        self._readers: OrderedDict[int, RankFileReader] = OrderedDict()
        self._mark = -1
        self.manifest = read_manifest(self._place)

    def _open(self, stored: StoredFile) -> RankFileReader:
        return _Reader(self._place, stored)


class _Reader(RankFileReader):
    """A reader of a rank's file that downloads a large range of bytes at a time."""

    def __init__(self, version: Remote, stored: StoredFile) -> None:
        self._version = version
        self._window = (0, b"")
        super().__init__(version, stored)

    def close(self) -> None:
        """Discard the downloaded data."""
        self._window = (0, b"")

    def _open(self) -> int:
        size = self._version.sizes().get(self._stored.name)
        if size is None:
            raise self._error("the file is missing")
        return size

    def _fetch(self, offset: int, target: memoryview) -> None:
        first, content = self._window
        if not first <= offset <= offset + len(target) <= first + len(content):
            end = min(self._stored.num_bytes, offset + max(_WINDOW_BYTES, len(target)))
            try:
                content = self._version.read(self._stored.name, offset, end)
            except FileNotFoundError:
                raise self._error("the file is missing") from None
            first, self._window = offset, (offset, content)
        piece = content[offset - first :][: len(target)]
        if len(piece) < len(target):
            raise self._error(f"the file is truncated: it ends at byte {offset + len(piece)}")
        target[:] = piece
