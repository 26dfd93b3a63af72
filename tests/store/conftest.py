"""Servers and stores for the store's tests. Each test gets its own server on a free port."""

from __future__ import annotations

import pytest

from echelon.store import StoreServer, TCPStore
from tests.store.peers import Raw, closing_all, ours


@pytest.fixture
def server():
    with StoreServer() as running:
        yield running


@pytest.fixture
def closing():
    with closing_all() as note:
        yield note


@pytest.fixture
def raw(server, closing):
    """Make raw connections of torch's kind."""
    return lambda **kwargs: closing(Raw(server.port, **kwargs))


@pytest.fixture
def raw_ours(server, closing):
    """Make raw connections of our kind."""
    return lambda: closing(ours(server.port))


@pytest.fixture
def client(server, closing):
    """Make clients of ours."""
    return lambda **kwargs: closing(TCPStore("127.0.0.1", server.port, timeout=20.0, **kwargs))
