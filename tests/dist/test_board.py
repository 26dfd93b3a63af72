"""The board listens beside everything else, and must not look like a rank that waits."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from echelon.dist.membership.board import Board
from echelon.store import MemoryStore


def test_what_the_board_awaits_is_not_recorded_as_what_its_rank_awaits():
    observed: list[str] = []
    heard = threading.Event()

    @contextlib.contextmanager
    def observe(operation: str, key: str) -> Iterator[None]:
        observed.append(f"{operation} {key} {threading.current_thread().name}")
        yield

    board = Board(MemoryStore(observer=observe))
    board.attach("group/", lambda _: heard.set())
    board.post("group/", {"kind": "lost"})
    assert heard.wait(30), "the board does not listen"
    board.detach("group/")
    assert [one for one in observed if one.endswith("echelon-board")] == []
