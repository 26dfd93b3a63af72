"""Post short notices on a board, which is a sequence of numbered keys in the store.

Every rank of a world watches the board. A rank whose group has failed posts a verdict. A rank that
must find out which ranks are dead posts a question, which every member's process answers even if
its main thread is busy. Each notice is written to the next key with an atomic compare_set, so
notices are never lost or reordered. The launcher posts a notice for all groups if an attempt ends
because a node was lost.

Only worlds with several hosts need a board: within one host, deaths are detected directly.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable
from typing import Any

from echelon.errors import StoreError, StoreTimeoutError
from echelon.recorder.continuation import BOARD, EVERY_GROUP
from echelon.store import PrefixStore, TCPStore
from echelon.store.base import Store

QUICK_S = 0.5  # limit of each store call where a failure is being handled
_LISTEN_S = 30.0
_RETRY_S = 1.0
_CLOSE_S = 0.5

Take = Callable[[dict[str, Any]], None]


def quick(store: Store) -> Store:
    """Return a store with the same keys, its own connection and a timeout of `QUICK_S` per call.

    Raises:
        StoreError: the store cannot be reached.
    """
    if isinstance(store, PrefixStore):
        return PrefixStore(store.prefix, quick(store.underlying_store))
    return store.clone(QUICK_S) if isinstance(store, TCPStore) else store.clone()


def path_of(store: Store) -> str:
    """Return the prefix that a view of a store adds to all keys."""
    if isinstance(store, PrefixStore):
        return f"{path_of(store.underlying_store)}{store.prefix}/"
    return ""


def _whole(store: Store) -> Store:
    """Return the store below any nested views, or `store` itself if it is not a view."""
    return _whole(store.underlying_store) if isinstance(store, PrefixStore) else store


class Board:
    """A process's connection to a board. The process listens while any group is attached.

    Args:
        store: any view of the store. The board's keys do not depend on the view's prefix, so
            the launcher can find the board.
    """

    def __init__(self, store: Store) -> None:
        self._store = PrefixStore(BOARD, _whole(store))
        self._takers: dict[str, Take] = {}
        self._lock = threading.RLock()
        self._next = 0
        self._client: Store | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def attach(self, path: str, take: Take) -> None:
        """Start calling `take` on the board's thread with each notice for a group.

        Args:
            path: the prefix of the group's keys (see `path_of`).
            take: the function to call.

        Raises:
            StoreError: the store cannot be reached within the store's timeout.
        """
        with self._lock:
            self._takers[path] = take
            if self._thread is None:
                self._stop = threading.Event()
                # Not `quick`: a loaded store must not fail the group that is being made.
                self._client = self._store.clone()
                # It always waits: observed, that would look like a rank which waits for the store.
                self._client.observer = None
                self._thread = threading.Thread(
                    target=self._listen,
                    args=(self._client, self._stop),
                    name="echelon-board",
                    daemon=True,
                )
                self._thread.start()

    def detach(self, path: str) -> None:
        """Stop receiving notices for a group.

        The board stops listening once no groups are attached.
        """
        with self._lock:
            self._takers.pop(path, None)
            if self._takers or self._thread is None:
                return
            thread, self._thread = self._thread, None
            client, self._client = self._client, None
            self._stop.set()
        if client is not None:
            client.close()
        if thread is not threading.current_thread():
            thread.join(_CLOSE_S)

    def post(self, path: str, notice: dict[str, Any]) -> None:
        """Post a notice for one group.

        Raises:
            StoreError: the store cannot be reached, or did not answer within `QUICK_S`.
        """
        text = json.dumps(notice | {"group": path})
        with contextlib.closing(quick(self._store)) as client:
            number = self._next
            while client.compare_set(str(number), "", text).decode() != text:
                number += 1

    def _listen(self, client: Store, stop: threading.Event) -> None:
        while not stop.is_set():
            try:
                text = client.get(str(self._next), timeout=_LISTEN_S)
            except StoreTimeoutError:
                continue
            except StoreError:
                stop.wait(_RETRY_S)
                continue
            self._next += 1
            with contextlib.suppress(ValueError, KeyError, TypeError, StoreError):
                self._pass_on(json.loads(text))

    def _pass_on(self, notice: dict[str, Any]) -> None:
        path = notice["group"]
        for known, take in list(self._takers.items()):
            if path in (known, EVERY_GROUP):
                take(notice)
