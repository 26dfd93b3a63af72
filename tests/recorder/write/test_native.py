"""The C core writes what the Python writer does: the same bytes for the same calls."""

from __future__ import annotations

import itertools
import random
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from echelon.recorder.format.schema import NUM_KEPT, NUM_OPEN_SPANS, Identity, Live, State
from echelon.recorder.read import read_ring
from echelon.recorder.write import native
from echelon.recorder.write.recorder import Recorder
from echelon.recorder.write.ring.ring import Ring

pytestmark = pytest.mark.skipif(not native.available(), reason="the C core was not built")

NUM_OPERATIONS = 8
NUMBERS = st.one_of(
    st.integers(-2, 300),
    st.sampled_from([-(1 << 31), (1 << 31) - 1, 1 << 31, -(1 << 63), (1 << 63) - 1, 1 << 70]),
    st.booleans(),
)


def in_u32(number: int) -> bool:
    return 0 <= number < 1 << 32


DIMS = st.lists(NUMBERS, max_size=9).map(tuple)
TEXTS = st.sampled_from(["", "all_reduce", "sum", "float32", "é" * 3, "x" * 5000])
DETAILS = st.one_of(TEXTS, st.none(), st.integers(), st.text(max_size=900))
TIMEOUTS = st.one_of(st.floats(), st.integers(-1, 1 << 40))
CALLS = st.fixed_dictionaries(
    {},
    optional={
        "sequence": NUMBERS,
        "p2p_sequence": NUMBERS,
        "dtype": TEXTS,
        "shapes": st.one_of(
            st.lists(DIMS, max_size=9).map(tuple), st.lists(st.lists(st.integers(0, 9)))
        ),
        "input_splits": st.lists(NUMBERS, max_size=40).map(tuple),
        "output_splits": st.lists(NUMBERS, max_size=40).map(tuple),
        "num_bytes": NUMBERS,
        "reduce_op": TEXTS,
        "root": NUMBERS,
        "peer": NUMBERS,
        "tag": NUMBERS,
        "coalesced": NUMBERS,
        "timeout_s": TIMEOUTS,
        "flags": NUMBERS,
        "depth": st.integers(0, 40),
        "is_started": st.booleans(),
    },
)
SHAPES = st.lists(DIMS, max_size=9).map(tuple)
PREPARED = st.tuples(
    NUMBERS, TEXTS, TEXTS, SHAPES, NUMBERS, TEXTS, NUMBERS, st.one_of(TIMEOUTS, st.none())
)
VARYING = st.tuples(NUMBERS, NUMBERS, NUMBERS, st.integers(0, 40), st.booleans())
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("begin"), NUMBERS, TEXTS, CALLS),
        st.tuples(st.just("prepare"), PREPARED),
        st.tuples(st.just("begin_prepared"), st.integers(0, 9), VARYING),
        st.tuples(st.just("started"), st.integers(-1, 40), st.one_of(st.none(), NUMBERS)),
        st.tuples(st.just("completed"), st.integers(-1, 40), st.one_of(st.none(), NUMBERS)),
        st.tuples(st.just("failed"), st.integers(-1, 40)),
        st.tuples(st.just("step")),
        st.tuples(st.just("open_span"), TEXTS, DETAILS, st.integers(0, 40)),
        st.tuples(st.just("close_span"), st.integers(0, 70)),
        st.tuples(st.just("keep_span"), NUMBERS.filter(in_u32), st.integers(0, 9)),
    ),
    max_size=40,
)


class Pair:
    """Two recorders with clocks of their own that tick alike: one in Python, one in C."""

    def __init__(self, folder: Path) -> None:
        self.rings = []
        self.recorders = []
        for name in ("python", "c"):
            ring = Ring(folder / name, Identity(rank=3), num_operations=NUM_OPERATIONS, num_spans=3)
            clock = itertools.count(1_000_000_007, 1_000_003)
            recorder = Recorder(ring, in_c=name == "c", now=lambda clock=clock: next(clock))
            assert recorder.is_in_c == (name == "c")
            self.rings.append(ring)
            self.recorders.append(recorder)
        self.spans: list[list] = [[], []]
        self.calls: list[list] = [[], []]

    def close(self) -> None:
        for ring in self.rings:
            ring.close()
            ring.path.unlink()

    def do(self, step: tuple) -> None:
        both = zip(self.recorders, self.spans, self.calls, strict=True)
        answers = [take(recorder, spans, calls, step) for recorder, spans, calls in both]
        assert answers[0] == answers[1], step

    def check(self) -> None:
        python, c = (ring.path.read_bytes() for ring in self.rings)
        if python != c:
            at = next(i for i, (a, b) in enumerate(zip(python, c, strict=True)) if a != b)
            pytest.fail(f"byte {at} differs: {python[at - 8 : at + 64]!r} {c[at - 8 : at + 64]!r}")


def take(recorder: Recorder, spans: list, calls: list, step: tuple) -> object:
    """Make one call; the caller's line is the same for both writers."""
    kind, *rest = step
    if kind == "begin":
        return recorder.begin(rest[0], rest[1], **rest[2])
    if kind == "prepare":
        calls.append(recorder.prepare(*rest[0]))
        return calls[-1] is None
    if kind == "begin_prepared":
        return recorder.begin_prepared(calls[rest[0] % len(calls)], *rest[1]) if calls else None
    if kind == "started":
        return recorder.started(*rest)
    if kind == "completed":
        return recorder.completed(*rest)
    if kind == "failed":
        return recorder.failed(rest[0], ValueError(f"number {rest[0]}"))
    if kind == "open_span":
        spans.append(recorder.open_span(*rest))
        return spans[-1] is None
    if kind == "close_span":  # one of those that were opened, perhaps for the second time
        return recorder.close_span(spans[rest[0] % len(spans)]) if spans else None
    if kind == "keep_span":
        return recorder.keep_span(rest[0], 0, 1000, 1000 + rest[1])
    return recorder.step()


@settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(steps=STEPS)
def test_both_writers_leave_the_same_bytes(tmp_path, steps):
    pair = Pair(tmp_path)
    try:
        for step in steps:
            pair.do(step)
        pair.check()
    finally:
        pair.close()


def test_both_writers_forget_signatures_alike(tmp_path):
    """More than the log of recent texts holds, some of it met again and again."""
    choose = random.Random(5)
    pair = Pair(tmp_path)
    pair.do(("prepare", (0, "all_reduce", "float32", ((2, 3),), 24, "sum", -1, 9.0)))
    try:
        for i in range(2600):
            shapes = ((choose.choice((choose.randrange(64), i)), *range(7)),) * 8
            pair.do(("begin", 0, "all_to_all", {"shapes": shapes, "input_splits": (1,) * (i % 60)}))
            if i % 50 == 0:
                pair.do(("begin_prepared", 0, (i, -1, 0, 1, False)))
                pair.do(("completed", i + i // 50, None))
            pair.do(("completed", i - choose.randrange(3), None))
        assert pair.rings[0].live[Live.RECENT_UNITS] > 2 * (1 << 19) // 16
        pair.check()
    finally:
        pair.close()


def test_both_writers_know_a_line_by_its_callers_and_by_what_it_passes(tmp_path):
    """The Python writer takes what a line passed last, from the same callers, as it was."""
    choose = random.Random(11)
    pair = Pair(tmp_path)

    def begin(shapes: tuple, tag: int) -> None:
        pair.do(("begin", 0, "send", {"shapes": shapes, "tag": tag, "depth": depth}))

    def here(*what: object) -> None:
        begin(*what)

    def there(*what: object) -> None:
        begin(*what)

    try:
        for i in range(400):
            depth = choose.choice((1, 2, 3, 4, 5, 60, 61))
            line = choose.choice((here, there, begin))
            line(choose.choice((((3, 4),), ((3, 4.0),), ((5,),), [[6]])), choose.randrange(2))
            pair.do(("completed", i - choose.randrange(3), None))
            if i % 40 == 0:  # the log of recent texts moves on: all references are forgotten
                for ring in pair.rings:
                    for n in range(150):
                        ring.texts.recent(f"{i} {n} {'y' * 600}")
        pair.check()
    finally:
        pair.close()


@pytest.mark.parametrize("wrong", [{"sequence": "x"}, {"timeout_s": None}, {"shapes": 5}])
def test_what_cannot_be_recorded_is_not_and_raises_nothing(tmp_path, wrong):
    pair = Pair(tmp_path)
    try:
        for recorder in pair.recorders:
            assert recorder.begin(0, "barrier", **wrong) == -1
            assert recorder.begin(0, "barrier") >= 0
            recorder.completed(-1)
            recorder.started("x")
            recorder.completed(None)
        for ring in pair.rings:
            assert [int(row["state"]) for row in read_ring(ring.path).operations] == [State.CREATED]
    finally:
        pair.close()


def test_both_writers_number_alike_while_nothing_can_be_recorded(tmp_path):
    """All slots and all places of their own hold operations that do not end."""
    pair = Pair(tmp_path)
    try:
        for i in range(NUM_OPERATIONS + NUM_KEPT + 3):
            pair.do(("begin", 0, f"operation {i}", {}))
        assert pair.rings[0].live[Live.KEPT_REFUSED] == 3
        pair.do(("completed", NUM_KEPT, None))
        pair.do(("begin", 0, "last", {}))
        pair.check()
    finally:
        pair.close()


@pytest.mark.parametrize("wrong", [None, 7, "call", (1, 2), object()])
def test_what_was_not_prepared_is_not_recorded(tmp_path, wrong):
    pair = Pair(tmp_path)
    try:
        for recorder in pair.recorders:
            assert recorder.begin_prepared(wrong, 0, -1, 0, 1, True) == -1
        assert all(ring.live[Live.NUM_OPERATIONS] == 0 for ring in pair.rings)
    finally:
        pair.close()


def test_a_call_prepared_for_another_writer_is_not_recorded(tmp_path):
    pair = Pair(tmp_path)
    try:
        other = Recorder(pair.rings[0], in_c=True)
        call = other.prepare(0, "all_reduce", "float32", ((2,),), 8, "sum", -1, 9.0)
        assert pair.recorders[1].begin_prepared(call, 0, -1, 0, 1, True) == -1
        assert other.begin_prepared(call, 0, -1, 0, 1, True) == 0
    finally:
        pair.close()


def test_a_writer_whose_ring_is_closed_records_nothing(tmp_path):
    pair = Pair(tmp_path)
    c = pair.recorders[1]
    begin, completed = c.begin, c.completed
    call = c.prepare(0, "all_reduce", "float32", ((2,),), 8, "sum", -1, 9.0)
    pair.close()
    assert begin(0, "barrier") == -1
    assert c.begin_prepared(call, 0, -1, 0, 1, True) == -1
    completed(0)


def test_more_spans_open_than_places_are_written_alike(tmp_path):
    pair = Pair(tmp_path)
    try:
        for i in range(NUM_OPEN_SPANS + 3):
            pair.do(("open_span", f"level {i % 3}", f"detail {i}", 1))
        for i in (*range(0, NUM_OPEN_SPANS + 3, 2), 0, 2):
            pair.do(("close_span", i))
        pair.check()
        for _ in range(NUM_OPEN_SPANS // 2 + 2):
            pair.do(("open_span", "again", "", 1))
        pair.check()
        assert pair.rings[1].live[Live.OPEN_SPANS_REFUSED] > 3
    finally:
        pair.close()


def test_a_span_of_another_writer_changes_nothing(tmp_path):
    pair = Pair(tmp_path)
    python, c = pair.recorders
    try:
        foreign = [Recorder(ring, in_c=True).open_span("foreign", "", 1) for ring in pair.rings[1:]]
        for wrong in (*foreign, python.open_span("python's", "", 1), None, 7):
            c.close_span(wrong)
        assert pair.rings[1].live[Live.NUM_SPANS] == 0
    finally:
        pair.close()


def test_the_core_leaks_no_references(ring):
    recorder = Recorder(ring)
    assert recorder.is_in_c
    shapes = ((5, 7),)
    counted = [shapes, "all_reduce", "float32", "a detail", sys._getframe().f_code]

    def record() -> None:
        recorder.completed(recorder.begin(0, "all_reduce", dtype="float32", shapes=shapes))
        call = recorder.prepare(0, "all_reduce", "float32", shapes, 4, "all_reduce", -1, 9.0)
        recorder.completed(recorder.begin_prepared(call, 0, -1, 0, 1, True))
        recorder.close_span(recorder.open_span("compute", "a detail", 1))

    for _ in range(100):
        record()
    before = [sys.getrefcount(one) for one in counted]
    for _ in range(1000):
        record()
    assert [sys.getrefcount(one) for one in counted] == before
