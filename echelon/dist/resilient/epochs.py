"""Read the epochs that the launcher publishes, and synchronize the ranks of an epoch.

An epoch is a numbered set of ranks that train together until a rank is lost or joins. A rank only
reads the newest epoch, and never decides which ranks are lost. If a rank of the new epoch is lost
while the other ranks are waiting for it, the launcher ends the wait, so that these ranks can read a
newer epoch.

A rank that is computing, or is waiting for an unresponsive host, does not detect a loss by itself.
A background thread (`News`) therefore waits for each new epoch and passes it to a callback, which
aborts the groups of the old world after a loss.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable
from typing import Any

from typing_extensions import Self

from echelon.dist.backends.interface import Members
from echelon.dist.membership.meet import arrive
from echelon.errors import StoreError, StoreTimeoutError
from echelon.recorder.continuation import Epoch, begun_key, epoch_key, meeting_key
from echelon.store.base import Store

_LISTEN_S = 30.0  # of one question to the store
_RETRY_S = 1.0
_CLOSE_S = 0.5


class Superseded(Exception):  # noqa: N818 -- not an error that a user sees
    """An epoch was replaced by a newer one before all of its ranks arrived at its rendezvous."""


class Epochs:
    """This rank's view of the epochs that the launcher publishes during an attempt.

    Args:
        store: the job's store.
        rank: this process's rank, as numbered by the launcher.
        after: the number of the epoch that was current when this process started. This epoch and
            all earlier epochs are skipped.
    """

    def __init__(self, store: Store, rank: int, after: int = 0) -> None:
        self._store = store
        self._rank = rank
        self.number = after

    def next(self, timeout_s: float) -> Epoch:
        """Wait for an epoch newer than the last one returned; return the newest epoch.

        Raises:
            StoreTimeoutError: no new epoch was published within `timeout_s` seconds.
            StoreError: the store cannot be reached.
        """
        number = self.number + 1
        text = self._store.get(epoch_key(number), timeout=timeout_s)
        while self._is_there(number + 1):
            number += 1
            text = self._store.get(epoch_key(number), timeout=timeout_s)
        self.number = number
        return Epoch.unpack(text)

    def meet(self, epoch: Epoch, mine: dict[str, Any], timeout_s: float) -> list[dict[str, Any]]:
        """Exchange one value per rank of an epoch; block until all ranks have arrived.

        Returns:
            The ranks' values, in the order of the roster.

        Raises:
            Superseded: the launcher has published a newer epoch, because a rank was lost.
            StoreTimeoutError: a rank did not arrive within `timeout_s` seconds.
            StoreError: the store cannot be reached.
        """
        roster = list(epoch.roster)
        key = meeting_key(epoch.number)
        members = Members(name="continuation", rank=roster.index(self._rank), ranks=roster)
        arrive(members, self._store, key, mine)
        self._store.wait([f"{key}/gate"], timeout=timeout_s)
        if self._is_there(epoch.number + 1):
            raise Superseded
        names = [f"{key}/{place}" for place in range(len(roster))]
        return [json.loads(text) for text in self._store.multi_get(names)]

    def note_begun(self) -> None:
        """Record in the store that this rank has begun training and can continue after a loss.

        Raises:
            StoreError: the store cannot be reached.
        """
        self._store.set(begun_key(self._rank), b"1")

    def _is_there(self, number: int) -> bool:
        return self._store.check([epoch_key(number)])


class News:
    """A thread that waits for new epochs, with its own connection to the store.

    Args:
        store: the job's store.
        take: a function that the thread calls with each new epoch.
        after: the number of the epoch that was current when this process started. This epoch and
            all earlier epochs are skipped.
    """

    def __init__(self, store: Store, take: Callable[[Epoch], None], after: int = 0) -> None:
        self._take = take
        self._number = after + 1
        self._client = store.clone()
        self._client.observer = None  # it always waits, which explains nothing
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="echelon-epochs", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._client.close()
        self._thread.join(_CLOSE_S)

    def _listen(self) -> None:
        number = self._number
        while not self._stop.is_set():
            try:
                text = self._client.get(epoch_key(number), timeout=_LISTEN_S)
            except StoreTimeoutError:
                continue
            except StoreError:
                self._stop.wait(_RETRY_S)
                continue
            number += 1
            with contextlib.suppress(ValueError):
                self._take(Epoch.unpack(text))
