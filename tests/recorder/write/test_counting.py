"""Threads draw each number once, also where no interpreter lock orders them."""

from __future__ import annotations

import sys
import threading

import pytest

from echelon.recorder.write.counting import counter


@pytest.mark.parametrize("has_lock", [None, True, False])
def test_each_number_is_drawn_once(has_lock):
    draw = counter(5, has_lock=has_lock)
    drawn: list[list[int]] = [[] for _ in range(4)]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [
            threading.Thread(target=lambda own=own: own.extend(draw() for _ in range(2000)))
            for own in drawn
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert sorted(number for own in drawn for number in own) == list(range(5, 8005))
    assert all(own == sorted(own) for own in drawn)
