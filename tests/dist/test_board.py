"""The board listens beside everything else, and must not look like a rank that waits."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from echelon.dist.membership.board import Board
from echelon.recorder.continuation import BOARD, lost_notice
from echelon.store import MemoryStore, PrefixStore


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


def test_a_notice_for_all_groups_reaches_boards_under_any_prefix():
    store = MemoryStore()
    board = Board(PrefixStore("attempt", PrefixStore("world_0", store)))
    heard: dict[str, dict[str, object]] = {}
    done = threading.Semaphore(0)

    def take(path: str, notice: dict[str, object]) -> None:
        heard[path] = notice
        done.release()

    for path in ("one/", "two/"):
        board.attach(path, lambda notice, path=path: take(path, notice))
    notice = lost_notice([2, 3], "ranks 2 and 3 were lost")
    assert len(notice.split()) == 1, "the store's server takes a single word"
    store.set(f"{BOARD}/0", notice)
    for _ in range(2):
        assert done.acquire(timeout=60), "the board does not pass the notice on"
    board.detach("one/")
    board.detach("two/")
    assert heard["one/"] == heard["two/"]
    assert (heard["one/"]["ranks"], heard["one/"]["text"]) == ([2, 3], "ranks 2 and 3 were lost")
