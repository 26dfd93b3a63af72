"""Ranks of several hosts learn where their stamps lie on rank 0's clock."""

from __future__ import annotations

import threading
import time

import pytest

from echelon.dist.membership.clocks import agree
from echelon.store import MemoryStore, PrefixStore


def _agree_all(clocks: list[tuple[str, int]]) -> list:
    """Let a thread a rank agree; each has a clock's name and how far that clock is ahead."""
    store = MemoryStore()
    found: list = [None] * len(clocks)

    def run(rank: int) -> None:
        name, ahead_ns = clocks[rank]
        found[rank] = agree(
            PrefixStore("clocks", store), rank, len(clocks), 20.0,
            my_clock=name, now=lambda: time.monotonic_ns() + ahead_ns,
        )  # fmt: skip

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(clocks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return found


def test_ranks_of_one_host_have_one_clock():
    assert [(o.offset_ns, o.error_ns) for o in _agree_all([("a", 0)] * 3)] == [(0, 0)] * 3


@pytest.mark.parametrize("ahead_s", [5.0, -3600.0])
def test_ranks_of_other_hosts_find_their_offset_within_its_bound(ahead_s):
    ahead_ns = int(ahead_s * 1e9)
    offsets = _agree_all([("a", 0), ("a", 0), ("b", ahead_ns), ("b", ahead_ns), ("c", 7)])
    assert (offsets[1].offset_ns, offsets[1].error_ns) == (0, 0)
    for offset in offsets[2:4]:
        assert abs(offset.offset_ns + ahead_ns) <= offset.error_ns
        assert 0 < offset.error_ns < 10**9
    assert offsets[2] == offsets[3], "the ranks of a host share what one of them measured"
    assert abs(offsets[4].offset_ns + 7) <= offsets[4].error_ns


def test_a_clock_without_a_name_is_not_measured():
    assert [o.error_ns for o in _agree_all([("", 0), ("", 0)])] == [-1, -1]
