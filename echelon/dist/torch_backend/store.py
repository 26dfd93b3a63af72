"""Torch's store as one of ours: where the members of a torch group meet.

Torch hands a backend the store of its own rendezvous, of whatever kind. So no second rendezvous is
needed, and programs that meet through a file or with a store of their own work as well.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed

from echelon.errors import StoreConnectionError, StoreError
from echelon.recorder import span
from echelon.store.base import Store
from echelon.store.deadline import Deadline

_SLICE_S = 1.0  # a signal's handler runs between two slices, and other threads get their turn
_torch: Any = torch.distributed


class TorchStore(Store):
    """A torch store; the names of keys and their values go through as they are."""

    def __init__(self, store: Any) -> None:
        self._store = _own_connection(store)
        self.observer = lambda operation, key: span("store", f"{operation} {key}")

    @property
    def endpoint(self) -> str:
        """Where torch's store is, as far as it tells."""
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
        while True:
            slice_s = max(0.001, min(_SLICE_S, deadline.left_s))
            try:
                self._store.wait(_names(keys), timedelta(seconds=slice_s))
            except RuntimeError as err:  # of several classes, by kind of store
                if "timeout" not in str(err).lower():
                    raise self._lost("wait", keys[0], err) from err
                if deadline.left_s > 0:
                    continue
                missing = [key for key in keys if not self._do_check([key])]
                self._raise_wait_timeout("wait", keys, missing, deadline)
            return

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
        """Keep a queue as numbered keys: torch's own exist on its TCPStore alone."""
        self._do_set(b"%s/item/%d" % (key, self._do_add(key + b"/pushed", 1)), value)

    def _do_queue_pop(self, key: bytes) -> bytes | None:
        if not self._do_queue_len(key):
            return None
        return self._do_queue_pop_wait(key, Deadline(_SLICE_S))

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


def _own_connection(store: Any) -> Any:
    """Return a store with a connection of its own, so that our waits block nobody else's calls."""
    if isinstance(_root(store), _torch.TCPStore) and hasattr(store, "clone"):
        return store.clone()
    return store
