"""Choose the location of a ring, by default on a local file system.

A ring on a network file system would be unavailable if the network failed. If the rank's folder is
on a local file system without copy-on-write, the ring is in this folder. Otherwise, the ring is in
the node's temporary folder, and the rank's folder contains a link `ring`. ECHELON_RING_DIR selects
another folder. After the process has ended, `bring_home` replaces the link with the file.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path

_REMOTE = frozenset(
    {
        "9p", "acfs", "afs", "beegfs", "ceph", "cifs", "coda", "fhgfs", "gfs2", "glusterfs",
        "gpfs", "lustre", "ncpfs", "nfs", "nfs4", "ocfs2", "orangefs", "panfs", "pvfs2", "quobyte",
        "smb3", "smbfs", "vboxsf", "virtiofs", "wekafs",
    }
)  # fmt: skip
# Writing to a page whose blocks are reserved may move it: on a full disk, that store raises SIGBUS.
_COPY_ON_WRITE = frozenset({"bcachefs", "btrfs", "zfs"})
_LOCAL_FUSE = frozenset({"fuseblk", "fuse.fuse-overlayfs", "fuse.ntfs-3g"})
_BLOCK_BYTES = 1 << 16
_MOUNTS = Path("/proc/self/mountinfo")


@dataclass(frozen=True, slots=True)
class Place:
    """The location of a rank's ring, and the reason if it is outside the rank's folder."""

    ring: Path
    rank_dir: Path
    reason: str = ""  # "": it lies in the rank's folder itself

    @property
    def is_elsewhere(self) -> bool:
        """True if the rank's folder contains only a link to the ring."""
        return self.ring.parent != self.rank_dir

    def make(self) -> Path:
        """Create the ring's folder and the link to the ring, if needed; return the ring's path.

        Raises:
            FileExistsError: the rank's folder already contains a ring.
            OSError: the folder or the link cannot be created.
        """
        if self.is_elsewhere:
            (self.rank_dir / "ring").symlink_to(self.ring)
            self.ring.parent.mkdir(mode=0o700)
        return self.ring

    def give_up(self) -> None:
        """Remove everything that `make` created."""
        if self.is_elsewhere:
            with contextlib.suppress(OSError):
                (self.rank_dir / "ring").unlink()
            with contextlib.suppress(OSError):
                self.ring.parent.rmdir()


def choose_place(rank_dir: Path, ring_dir: Path | None = None) -> Place:
    """Choose the location of a rank's ring; `ring_dir` is the user's choice, or None.

    Raises:
        OSError: the node's temporary folder cannot be used.
    """
    rank_dir = rank_dir.absolute()
    if ring_dir is not None:
        return _place_below(ring_dir.absolute(), rank_dir, "set by ECHELON_RING_DIR")
    kind = file_system(rank_dir)
    if not is_remote(kind) and kind not in _COPY_ON_WRITE:
        return Place(rank_dir / "ring", rank_dir)
    return _place_below(_temporary_folder(), rank_dir, f"{rank_dir} is on a {kind} file system")


def claim_attempt(record_dir: Path, rank: int) -> tuple[Path, int]:
    """Create the folder for a rank's next attempt in a job that has no launcher.

    Raises:
        OSError: the folder cannot be created.
    """
    folder = record_dir.absolute() / f"rank_{rank}"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    names = [path.name.removeprefix("attempt_") for path in folder.glob("attempt_*")]
    number = max([int(name) for name in names if name.isdecimal()], default=-1) + 1
    while True:
        try:
            (folder / f"attempt_{number}").mkdir(mode=0o700)
        except FileExistsError:
            number += 1
        else:
            return folder / f"attempt_{number}", number


def bring_home(rank_dir: Path) -> bool:
    """Replace a link to a ring with the ring itself; return False if there was no link.

    Call this function after the ring's process has ended. The mappings of attached readers remain
    valid.

    Raises:
        OSError: the ring cannot be moved; the link and the file are unchanged.
    """
    link = rank_dir / "ring"
    if not link.is_symlink() or not link.is_file():
        return False
    away = link.resolve()
    part = rank_dir / ".ring.part"
    try:
        _copy_sparse(away, part)
        part.chmod(0o600)
        part.replace(link)
    except OSError:
        part.unlink(missing_ok=True)
        raise
    away.unlink()
    with contextlib.suppress(OSError):
        away.parent.rmdir()
    return True


def _copy_sparse(source: Path, target: Path) -> None:
    """Copy a file sparsely: blocks of zeros become holes."""
    zeros = bytes(_BLOCK_BYTES)
    with source.open("rb") as read, target.open("wb") as write:
        while block := read.read(_BLOCK_BYTES):
            if block == zeros[: len(block)]:
                write.seek(len(block), os.SEEK_CUR)
            else:
                write.write(block)
        write.truncate()


def set_aside(rank_dir: Path) -> None:
    """Rename the ring of an ended process to the first free name among `ring.1`, `ring.2`, ...

    Raises:
        OSError: the folder cannot be written.
    """
    with contextlib.suppress(OSError):
        bring_home(rank_dir)
    number = 1
    while os.path.lexists(rank_dir / f"ring.{number}"):
        number += 1
    (rank_dir / "ring").rename(rank_dir / f"ring.{number}")


def is_remote(kind: str) -> bool:
    """Return whether file systems of this type are accessed over a network."""
    return kind in _REMOTE or (kind.split(".")[0] == "fuse" and kind not in _LOCAL_FUSE)


def file_system(path: Path, mounts: Path = _MOUNTS) -> str:
    """Return the type of the file system that contains a path, or "" if unknown."""
    try:
        lines = mounts.read_text("utf-8", "surrogateescape").splitlines()
    except OSError:
        return ""
    target = os.path.realpath(path)
    best, kind = -1, ""
    for line in lines:
        before, dash, after = line.partition(" - ")
        fields = before.split()
        if not dash or len(fields) < 5:
            continue
        point = fields[4].replace("\\040", " ").replace("\\011", "\t").replace("\\134", "\\")
        inside = target == point or target.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= best:  # the last of several equal ones is on top
            best, kind = len(point), after.split()[0]
    return kind


def _place_below(folder: Path, rank_dir: Path, reason: str) -> Place:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    name = f"{rank_dir.parent.name}-{secrets.token_hex(8)}"
    return Place(folder / name / "ring", rank_dir, reason)


def _temporary_folder() -> Path:
    """Return a folder for this user's rings in the node's temporary folder; create it if needed."""
    folder = Path(tempfile.gettempdir()) / f"echelon-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        return Path(tempfile.mkdtemp(prefix="echelon-"))
    return folder
