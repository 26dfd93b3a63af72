"""What a thread has spent on its spans, whether or not this process records."""

from __future__ import annotations

import threading

import pytest

from echelon import recorder
from echelon.recorder import marks
from echelon.recorder.spent import MAX_NAMES, spent


@pytest.fixture
def clock(monkeypatch):
    """A clock that the test sets, in nanoseconds."""
    now = [0]
    monkeypatch.setattr(marks, "monotonic_ns", lambda: now[0])
    monkeypatch.setattr(spent, "spans_ns", {})
    return now


def test_spans_of_one_name_add_up(clock):
    for _ in range(3):
        with recorder.span("data_wait"):
            clock[0] += 5
        clock[0] += 100
    assert spent.spans_ns == {"data_wait": 15}


def test_of_nested_spans_with_one_name_the_outermost_counts(clock):
    with recorder.span("data_wait"):
        clock[0] += 1
        with recorder.span("data_wait"):
            clock[0] += 10
        clock[0] += 100
    assert spent.spans_ns == {"data_wait": 111}


def test_a_span_that_ends_in_an_exception_counts(clock):
    def fail():
        with recorder.span("checkpoint"):
            clock[0] += 7
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert spent.spans_ns == {"checkpoint": 7}


def test_another_threads_spans_are_its_own(clock):
    def wait():
        with recorder.span("data_wait"):
            clock[0] += 50

    thread = threading.Thread(target=wait)
    thread.start()
    thread.join()
    assert spent.spans_ns == {}


def test_a_program_that_numbers_its_spans_does_not_grow_the_table(clock):
    for number in range(MAX_NAMES + 5):
        with recorder.span(f"part {number}"):
            clock[0] += 1
    with recorder.span("part 0"):
        clock[0] += 1
    assert len(spent.spans_ns) == MAX_NAMES
    assert spent.spans_ns["part 0"] == 2
