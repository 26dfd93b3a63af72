"""Making something on a separate thread: whose error the caller sees."""

from __future__ import annotations

import threading

import pytest

from echelon.dist.progress import aside
from echelon.dist.progress.aside import make_aside
from echelon.errors import PeerLostError


def _refused() -> None:
    raise RuntimeError("connection refused")


def _drop(made: int) -> None:
    pass


def test_a_death_that_is_seen_after_the_broken_connection_is_the_error():
    looks = iter([False, False, True])

    def check() -> None:
        if next(looks):
            raise PeerLostError("rank 1 died", group="g", operation="init", ranks=[1])

    with pytest.raises(PeerLostError, match="rank 1 died") as caught:
        make_aside(_refused, _drop, check)
    assert str(caught.value.__context__) == "connection refused"


def test_without_a_death_the_broken_connection_is_the_error(monkeypatch):
    monkeypatch.setattr(aside, "_DEATH_S", 0.05)
    looks: list[None] = []
    with pytest.raises(RuntimeError, match="connection refused"):
        make_aside(_refused, _drop, lambda: looks.append(None))
    assert looks


def test_what_was_made_is_returned():
    assert make_aside(lambda: 7, _drop, lambda: None) == 7


def test_an_error_of_the_check_is_raised_at_once():
    errors = iter(["first"])
    may_end = threading.Event()

    def check() -> None:
        raise RuntimeError(next(errors))

    with pytest.raises(RuntimeError, match="first"):
        make_aside(lambda: may_end.wait(60), lambda _: None, check)
    may_end.set()
