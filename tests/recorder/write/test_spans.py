"""Phases of a step: nested, open ones visible, and the step counter."""

from __future__ import annotations

import threading

import pytest

from echelon.recorder.format.schema import NUM_OPEN_SPANS, Live
from tests.recorder.conftest import NUM_SPANS


def names(record, rows):
    return [record.strings[row["name"]] for row in rows]


def test_an_open_span_is_seen_while_it_lasts(recorder, look):
    recorder.step(7)
    span = recorder.open_span("store", "wait('rdzv/ranks')", 0)
    record = look()
    (row,) = record.open_spans
    assert names(record, record.open_spans) == ["store"]
    assert record.strings[row["detail"]] == "wait('rdzv/ranks')"
    assert (row["step"], row["depth"], row["ended_mono_ns"]) == (7, 0, 0)
    assert row["thread"] == threading.get_native_id()
    assert record.strings[row["site"]].startswith(f"{__file__}:")
    recorder.close_span(span)
    record = look()
    assert len(record.open_spans) == 0
    (row,) = record.spans
    assert 0 < row["started_mono_ns"] <= row["ended_mono_ns"]


def test_nested_spans_are_outermost_first(recorder, look):
    outer = recorder.open_span("compute", "", 0)
    inner = recorder.open_span("checkpoint", "", 0)
    innermost = recorder.open_span("mine", "", 0)
    record = look()
    assert names(record, record.open_spans) == ["compute", "checkpoint", "mine"]
    assert record.open_spans["depth"].tolist() == [0, 1, 2]
    for span in (innermost, inner, outer):
        recorder.close_span(span)
    record = look()
    assert names(record, record.spans) == ["compute", "checkpoint", "mine"]  # in order of begin
    assert len(record.open_spans) == 0
    recorder.open_span("next", "", 0)
    assert look().open_spans["depth"].tolist() == [0]


def test_threads_nest_on_their_own(recorder, look):
    recorder.open_span("main", "", 0)
    thread = threading.Thread(target=lambda: recorder.open_span("other", "", 0))
    thread.start()
    thread.join()
    assert look().open_spans["depth"].tolist() == [0, 0]


def test_more_open_spans_than_places_are_counted_and_still_recorded_when_they_end(recorder, look):
    spans = [recorder.open_span(f"level {i}", "", 0) for i in range(NUM_OPEN_SPANS + 2)]
    record = look()
    assert len(record.open_spans) == NUM_OPEN_SPANS
    assert record.live[Live.OPEN_SPANS_REFUSED] == 2
    for span in reversed(spans):
        recorder.close_span(span)
    record = look()
    assert len(record.open_spans) == 0
    assert record.live[Live.NUM_SPANS] == NUM_OPEN_SPANS + 2
    again = recorder.open_span("again", "", 0)
    record = look()
    assert names(record, record.open_spans) == ["again"]
    recorder.close_span(again)


def test_a_span_ends_once(recorder, look):
    """Its place may be another span's by then, which must not vanish with it."""
    first = recorder.open_span("first", "", 0)
    recorder.close_span(first)
    later = [recorder.open_span(f"later {i}", "", 0) for i in range(NUM_OPEN_SPANS)]
    recorder.close_span(first)
    record = look()
    assert names(record, record.open_spans) == [f"later {i}" for i in range(NUM_OPEN_SPANS)]
    assert record.live[Live.NUM_SPANS] == 1
    for span in later:
        recorder.close_span(span)
    assert len({*look().spans["number"].tolist()}) == NUM_SPANS


def test_a_full_ring_of_spans_keeps_the_newest(recorder, look):
    for i in range(2 * NUM_SPANS + 1):
        recorder.close_span(recorder.open_span(f"span {i}", "", 0))
    record = look()
    newest = range(NUM_SPANS + 1, 2 * NUM_SPANS + 1)
    assert names(record, record.spans) == [f"span {i}" for i in newest]


def test_steps_count_up_from_zero_or_as_told(recorder, look):
    assert look().live[Live.STEP] == 0
    recorder.begin(0, "barrier")
    recorder.step()
    recorder.begin(0, "barrier")
    recorder.step()
    recorder.begin(0, "barrier")
    recorder.step(100)
    recorder.begin(0, "barrier")
    record = look()
    assert record.operations["step"].tolist() == [-1, 0, 1, 100]
    assert record.live[Live.STEP] == 101
    assert record.live[Live.STEP_MONO_NS] > 0


class Unprintable:
    def __str__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize("number", [2.0, "7", None, 1 << 80, -5, [1], float("nan")])
def test_a_step_raises_nothing(recorder, look, number):
    recorder.step(number)
    assert look().live[Live.STEP] >= 0


def test_a_detail_without_text_raises_nothing_and_leaks_nothing(recorder, look):
    for _ in range(NUM_OPEN_SPANS + 1):
        recorder.close_span(recorder.open_span("compute", Unprintable(), 0))
    span = recorder.open_span("compute", "", 10_000)
    record = look()
    assert record.live[Live.OPEN_SPANS_REFUSED] == 0
    assert record.open_spans["depth"].tolist() == [0]
    recorder.close_span(span)
