"""Which errors of Gloo mean a broken connection: only those make a group look for a dead rank."""

from __future__ import annotations

import threading

import pytest

pytest.importorskip("torch")

from echelon.dist.backends.gloo import backend, transport
from echelon.dist.backends.interface import ConnectionBroken

_OF_CONNECTIONS = (
    "[gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1",
    "[gloo/transport/tcp/pair.cc:446] Read error [127.0.0.1]:1: Connection reset",
    "writev [127.0.0.1]:52041: Broken pipe",
    "[gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1000ms for recv",
    "Application timeout caused pair closure",
)
_OF_THE_LIBRARY = (
    "Invalid scalar type",
    "[enforce fail at alloc_cpu.cpp:114] DefaultCPUAllocator: can't allocate memory",
    "ProcessGroupGloo::alltoall: tensors must have the same dtype",
)


def _raise(text: str) -> None:
    raise RuntimeError(text)


@pytest.mark.parametrize("text", _OF_CONNECTIONS)
def test_a_broken_connection_is_reported_as_one_with_its_text(text):
    with (
        pytest.raises(ConnectionBroken, match=text[-12:].replace("[", r"\[")),
        backend._telling_apart(),
    ):
        _raise(text)


@pytest.mark.parametrize("text", _OF_THE_LIBRARY)
def test_the_librarys_other_errors_are_passed_on_as_they_are(text):
    with pytest.raises(RuntimeError) as caught, backend._telling_apart():
        _raise(text)
    assert str(caught.value) == text


class _NeverDestroyed:
    """A Gloo group whose destructor waits for a peer that does not answer."""

    def __init__(self) -> None:
        self.is_destroyed, self.answers = threading.Event(), threading.Event()

    def __del__(self) -> None:
        self.answers.wait(60)
        self.is_destroyed.set()


def test_a_frozen_peer_does_not_keep_a_rank_from_closing_its_connections(monkeypatch):
    monkeypatch.setattr(transport, "_CLOSE_S", 0.05)
    mesh = transport.Transport.__new__(transport.Transport)
    mesh._made, mesh._swapper = _NeverDestroyed(), transport._Swapper()
    is_destroyed, answers = mesh._made.is_destroyed, mesh._made.answers
    mesh.close()
    assert not is_destroyed.is_set(), "close waited for it"
    answers.set()
    assert is_destroyed.wait(60)
