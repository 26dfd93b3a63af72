"""Let the members of a torch group join through torch's own store.

Torch passes its rendezvous store to a backend, so a second store is not needed. For a TCPStore,
echelon's client connects to the same server. Unlike torch's client, echelon's client waits without
logging and can be interrupted by signals. One client serves all groups of a process. Any other
store, such as a FileStore, is accessed through torch's own methods.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
from collections import Counter
from datetime import timedelta
from typing import Any

import torch.distributed

from echelon.errors import StoreConnectionError, StoreError
from echelon.recorder import span
from echelon.store import PrefixStore, TCPStore
from echelon.store.base import Store
from echelon.store.deadline import Deadline

_torch: Any = torch.distributed
_lock = threading.Lock()
_clients: dict[tuple[int, str, int], TCPStore] = {}
_users: Counter[tuple[int, str, int]] = Counter()


class Meeting:
    """One torch group's view of torch's store. Close the view together with the group."""

    def __init__(self, torch_store: Any, rank: int, timeout_s: float) -> None:
        """Agree on a prefix that no other group uses; block until group rank 0 has chosen one.

        Raises:
            StoreTimeoutError: group rank 0 did not join within `timeout_s`.
        """
        self._through_torch = through_torch = TorchStore(torch_store)
        self._rank = rank
        self._place = f"echelon/place/{through_torch.add(f'echelon/uses/{rank}', 1)}"
        if rank == 0:
            through_torch.set(self._place, secrets.token_hex(8))
        try:
            place = through_torch.get(self._place, timeout=timeout_s).decode()
        except StoreError:
            through_torch.add(f"echelon/uses/{rank}", -1)  # a second try meets at the same number
            raise
        self._client: tuple[int, str, int] | None = None
        below: Store = through_torch
        root = _root(torch_store)
        if isinstance(root, _torch.TCPStore):
            self._client = (os.getpid(), str(root.host), int(root.port))
            below = _join(self._client, timeout_s)
        self.store = PrefixStore(f"echelon/torch/{place}", below)

    def withdraw(self) -> None:
        """Undo this rank's changes to torch's store, so that creating the group can be retried."""
        with contextlib.suppress(StoreError):
            self._through_torch.add(f"echelon/uses/{self._rank}", -1)
            if self._rank == 0:
                self._through_torch.delete_key(self._place)
        self.close()

    def close(self) -> None:
        """Disconnect from the store, unless another group of this process uses the connection."""
        client, self._client = self._client, None
        if client is None or client[0] != os.getpid():
            return
        with _lock:
            _users[client] -= 1
            if not _users[client]:
                _clients.pop(client).close()


def _join(client: tuple[int, str, int], timeout_s: float) -> TCPStore:
    with _lock:
        if client not in _clients:
            _clients[client] = _connect(client, timeout_s)
        _users[client] += 1
        return _clients[client]


def _connect(client: tuple[int, str, int], timeout_s: float) -> TCPStore:
    _, host, port = client
    return TCPStore(host, port, timeout=timeout_s, observer=observed)


def observed(operation: str, key: str) -> span:
    """Return a span that records a wait for the store."""
    return span("store", f"{operation} {key}")


class TorchStore(Store):
    """An adapter that gives a torch store echelon's interface. Keys and values are unchanged."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.observer = observed

    @property
    def endpoint(self) -> str:
        """The "host:port" of torch's store or, if it has none, the store's type."""
        root = _root(self._store)
        host, port = getattr(root, "host", None), getattr(root, "port", None)
        return f"{host}:{port}" if host else f"torch's {type(root).__name__}"

    def clone(self) -> TorchStore:
        """Return another view of the same store."""
        return TorchStore(self._store)

    def _do_set(self, key: bytes, value: bytes) -> None:
        self._ask("set", key, value)

    def _do_get(self, key: bytes, deadline: Deadline) -> bytes:
        self._do_wait([key], deadline)
        return bytes(self._ask("get", key))

    def _do_add(self, key: bytes, amount: int) -> int:
        return int(self._ask("add", key, amount))

    def _do_append(self, key: bytes, value: bytes) -> None:
        self._ask("append", key, value)

    def _do_check(self, keys: list[bytes]) -> bool:
        return bool(self._call("check", keys[0], _names(keys)))

    def _do_compare_set(self, key: bytes, expected: bytes, desired: bytes) -> bytes:
        return bytes(self._ask("compare_set", key, expected, desired))

    def _do_delete(self, key: bytes) -> bool:
        return bool(self._ask("delete_key", key))

    def _do_wait(self, keys: list[bytes], deadline: Deadline) -> None:
        try:
            self._store.wait(_names(keys), timedelta(seconds=max(0.001, deadline.left_s)))
        except RuntimeError as err:  # of several classes, by kind of store
            if "timeout" not in str(err).lower():
                raise self._lost("wait", keys[0], err) from err
            missing = [key for key in keys if not self._do_check([key])]
            self._raise_wait_timeout("wait", keys, missing, deadline)

    def _do_num_keys(self) -> int:
        return int(self._call("num_keys", b""))

    def _do_list_keys(self) -> list[bytes]:
        return [name.encode() for name in self._call("list_keys", b"")]

    def _do_multi_get(self, keys: list[bytes], deadline: Deadline) -> list[bytes]:
        self._do_wait(keys, deadline)
        if self._store.has_extended_api():
            return [bytes(value) for value in self._call("multi_get", keys[0], _names(keys))]
        return [bytes(self._ask("get", key)) for key in keys]

    def _do_multi_set(self, keys: list[bytes], values: list[bytes]) -> None:
        for key, value in zip(keys, values, strict=True):
            self._do_set(key, value)

    def _do_queue_push(self, key: bytes, value: bytes) -> None:
        """Implement a queue with numbered keys, because only torch's TCPStore has queues."""
        self._do_set(b"%s/item/%d" % (key, self._do_add(key + b"/pushed", 1)), value)

    def _do_queue_pop(self, key: bytes) -> bytes | None:
        if not self._do_queue_len(key):
            return None
        return self._do_queue_pop_wait(key, Deadline(1.0))

    def _do_queue_pop_wait(self, key: bytes, deadline: Deadline) -> bytes:
        item = b"%s/item/%d" % (key, self._do_add(key + b"/popped", 1))
        value = self._do_get(item, deadline)
        self._do_delete(item)
        return value

    def _do_queue_len(self, key: bytes) -> int:
        return self._do_add(key + b"/pushed", 0) - self._do_add(key + b"/popped", 0)

    def _ask(self, operation: str, key: bytes, *operands: object) -> Any:
        return self._call(operation, key, key.decode("utf-8", "surrogateescape"), *operands)

    def _call(self, operation: str, key: bytes, *arguments: object) -> Any:
        try:
            return getattr(self._store, operation)(*arguments)
        except RuntimeError as err:
            raise self._lost(operation, key, err) from err

    def _lost(self, operation: str, key: bytes, error: Exception) -> StoreError:
        name = key.decode("utf-8", "replace")
        said = str(error).splitlines()[0] if str(error) else type(error).__name__
        return StoreConnectionError(
            f"{operation}({name!r}) on {self.endpoint}: {said}", key=name, endpoint=self.endpoint
        )


def _names(keys: list[bytes]) -> list[str]:
    return [key.decode("utf-8", "surrogateescape") for key in keys]


def _root(store: Any) -> Any:
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return store
