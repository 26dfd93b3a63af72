"""A key-value store for the processes of a job, compatible with torch's TCPStore."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from echelon.store.server.server import StoreServer
from echelon.store.client.client import TCPStore
from echelon.store.file import FileStore
from echelon.store.memory import MemoryStore
from echelon.store.prefix import PrefixStore

__all__ = ["TCPStore", "PrefixStore", "MemoryStore", "FileStore", "StoreServer"]


def __getattr__(name: str) -> Any:
    """Import the server lazily, because it imports asyncio."""
    if name == "StoreServer":
        from echelon.store.server.server import StoreServer

        return StoreServer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
