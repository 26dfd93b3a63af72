"""Access a folder in an object store, given the folder's address.

Objects appear atomically, and cannot be renamed or locked. A call that fails for a transient reason
is retried until a deadline. A call that hangs past the deadline is abandoned.
"""

from __future__ import annotations

import contextlib
import errno
import os
import queue
import re
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

_PATIENCE_S = 60.0  # for one call, with its repetitions
_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 5.0
_FINAL = (  # trying again does not help
    FileNotFoundError,
    PermissionError,
    IsADirectoryError,
    NotADirectoryError,
    NotImplementedError,
    TypeError,
    ValueError,
    AttributeError,
    ImportError,
)
_USER = re.compile(r"://[^/@]*@")
_Result = TypeVar("_Result")


def is_address(path: str | os.PathLike[str] | Remote) -> bool:
    """Return whether a path is the address of an object store."""
    return isinstance(path, Remote) or "://" in os.fspath(path)


def place_of(path: str | os.PathLike[str]) -> Path | Remote:
    """Return the local or remote folder that a path or an address refers to.

    Raises:
        ValueError: no installed package supports the address.
    """
    return Remote.at(os.fspath(path)) if is_address(path) else Path(path)


class Remote:
    """A folder in an object store.

    Args:
        address: the folder's full address. It is never shown, because it might contain credentials.
        fs: the `fsspec` file system.
        root: the folder's path in the file system.
        patience_s: the time limit for one call, including retries, in seconds.
    """

    def __init__(self, address: str, fs: Any, root: str, patience_s: float = _PATIENCE_S) -> None:
        self.address = address.rstrip("/")
        self.patience_s = patience_s
        self._fs = fs
        self._root = root.rstrip("/")

    @classmethod
    def at(cls, address: str) -> Remote:
        """Return the folder at an address.

        Raises:
            ValueError: no installed package supports the address.
        """
        scheme = address.partition("://")[0]
        options = {"auto_mkdir": True} if scheme in ("file", "local") else {}
        try:
            from fsspec.core import url_to_fs  # an extra: not needed for folders

            fs, root = url_to_fs(address, use_listings_cache=False, **options)
        except ImportError as error:
            is_fsspec = error.name in ("fsspec", "fsspec.core")
            reason = "fsspec is not installed" if is_fsspec else str(error)
            raise ValueError(
                f"{scheme}://...: {reason}. Run pip install 'echelon[remote]' and install the "
                "package for the store, or mount the storage and pass its folder"
            ) from None
        except ValueError as error:
            raise ValueError(f"{scheme}://...: {error}") from None
        return cls(address, fs, str(root))

    def __str__(self) -> str:
        """Return the address without credentials."""
        return _USER.sub("://", self.address)

    def __truediv__(self, name: str) -> Remote:
        return Remote(f"{self.address}/{name}", self._fs, f"{self._root}/{name}", self.patience_s)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Remote) and self.address == other.address

    def __hash__(self) -> int:
        return hash(self.address)

    @property
    def name(self) -> str:
        """The last component of the address."""
        return self.address.rpartition("/")[2]

    @property
    def parent(self) -> Remote:
        """The parent folder."""
        above, root = self.address.rpartition("/")[0], self._root.rpartition("/")[0]
        return Remote(above, self._fs, root, self.patience_s)

    def absolute(self) -> Remote:
        """Return this folder, because an address is always absolute."""
        return self

    def sizes(self) -> dict[str, int]:
        """Return the size of each entry in the folder, keyed by name.

        The dict is empty if the folder does not exist.
        """

        def look() -> list[dict[str, Any]]:
            self._fs.invalidate_cache()
            found: list[dict[str, Any]] = self._fs.ls(self._root, detail=True)
            return found

        try:
            found = self._call("list", look)
        except (FileNotFoundError, NotADirectoryError):
            return {}
        entries = {str(one["name"]).rstrip("/"): int(one["size"] or 0) for one in found}
        return {path.rpartition("/")[2]: size for path, size in entries.items()}

    def read(self, name: str, start: int | None = None, end: int | None = None) -> bytes:
        """Return an object's bytes, or only the bytes in [start, end).

        Raises:
            FileNotFoundError: the object does not exist.
            OSError: the object cannot be read within `patience_s`.
        """
        path = f"{self._root}/{name}"
        content = self._call(f"read {name}", lambda: self._fs.cat_file(path, start=start, end=end))
        return bytes(content)

    def write(self, name: str, data: bytes) -> None:
        """Create an object in the folder.

        Raises:
            OSError: the object cannot be written within `patience_s`.
        """
        self._call(f"write {name}", lambda: self._fs.pipe_file(f"{self._root}/{name}", data))

    def upload(self, local: Path, patience_s: float) -> None:
        """Upload a file under its own name and check the object's size.

        Raises:
            OSError: the file cannot be uploaded within `patience_s`.
        """
        path, size = f"{self._root}/{local.name}", local.stat().st_size

        def put() -> None:
            self._fs.put_file(str(local), path)
            self._fs.invalidate_cache()
            found = self._fs.info(path)["size"]
            if found != size:
                raise OSError(errno.EIO, f"only {found} of {size} bytes arrived")

        self._call(f"write {local.name}", put, patience_s)

    def remove(self, names: Iterable[str]) -> None:
        """Remove objects in the given order; missing objects are ignored.

        Raises:
            OSError: an object cannot be removed within `patience_s`.
        """
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                path = f"{self._root}/{name}"
                self._call(f"remove {name}", lambda path=path: self._fs.rm_file(path))  # type: ignore[misc]

    def remove_folder(self) -> None:
        """Remove the folder itself, if the store has real folders. All errors are ignored."""
        with contextlib.suppress(Exception):  # of no consequence, in any store
            _bounded(lambda: self._fs.rmdir(self._root), time.monotonic() + self.patience_s)

    def _call(
        self, what: str, call: Callable[[], _Result], patience_s: float | None = None
    ) -> _Result:
        limit_s = self.patience_s if patience_s is None else patience_s
        deadline_s, pause_s = time.monotonic() + limit_s, _PAUSE_S
        while True:
            try:
                return _bounded(call, deadline_s)
            except _FINAL:
                raise
            except Exception as error:  # noqa: BLE001 -- libraries have errors of their own
                if time.monotonic() + pause_s >= deadline_s:
                    reason = f"{type(error).__name__}: {_USER.sub('://', str(error))}"
                    raise OSError(
                        errno.EIO, f"{self}: cannot {what} within {limit_s:g} s: {reason}"
                    ) from None
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def _bounded(call: Callable[[], _Result], deadline_s: float) -> _Result:
    """Make a call in a separate thread, and wait until it returns or the deadline passes.

    Raises:
        TimeoutError: the call did not return by the deadline.
    """
    ended: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            ended.put((call(), None))
        except BaseException as error:  # noqa: BLE001 -- raised below
            ended.put((None, error))

    threading.Thread(target=run, name="echelon-remote", daemon=True).start()
    try:
        result, error = ended.get(timeout=max(0.0, deadline_s - time.monotonic()))
    except queue.Empty:
        raise TimeoutError("the call to the store did not return in time") from None
    if error is not None:
        raise error
    return result  # type: ignore[no-any-return]
