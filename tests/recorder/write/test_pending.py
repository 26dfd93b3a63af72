"""An operation that has not ended stays in the record, whatever is recorded after it."""

from __future__ import annotations

import random
import sys
import threading

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from echelon.recorder.format.layout import Layout
from echelon.recorder.format.schema import (
    KEPT_OPERATION,
    NUM_KEPT,
    Identity,
    Live,
    Signature,
    State,
)
from echelon.recorder.read import LiveRing, read_ring
from echelon.recorder.read.ring_texts import DAMAGED
from echelon.recorder.write import native
from echelon.recorder.write.recorder import NOT_RECORDED, Recorder
from echelon.recorder.write.ring.ring import Ring
from tests.recorder.conftest import NUM_OPERATIONS, NUM_SPANS

IN_C = [
    pytest.param(
        True, marks=pytest.mark.skipif(not native.available(), reason="the C core was not built")
    ),
    False,
]
# Of each step: begin an operation (0 to 5), or start (6, 7) or end (8 to 19) a pending one.
STEPS = st.lists(st.tuples(st.integers(0, 19), st.integers(0, 1 << 20)), max_size=400)


class Pending:
    """What a program has begun and not ended: the truth that the record is compared with."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.pending: dict[int, tuple[int, State]] = {}  # record -> (width of its shape, state)
        self.num_refused = 0

    def take(self, kind: int, choice: int) -> None:
        if kind > 5 and self.pending:
            record = sorted(self.pending)[choice % len(self.pending)]
            if kind < 8:
                self.recorder.started(record)
                self.pending[record] = self.pending[record][0], State.STARTED
            else:
                self.recorder.completed(record)
                del self.pending[record]
            return
        width = choice % 97
        record = self.recorder.begin(0, "send", shapes=((width, 3),), tag=width)
        if record == NOT_RECORDED:
            self.num_refused += 1
        else:
            self.pending[record] = width, State.CREATED

    def check(self, ring: Ring) -> None:
        record = read_ring(ring.path)
        shown = {
            int(row["record"]): (
                int(row["tag"]),
                State(row["state"]),
                record.signatures[row["signature"]],
            )
            for row in record.operations
            if row["state"] < State.COMPLETED
        }
        assert shown == {
            number: (width, state, Signature("", ((width, 3),)))
            for number, (width, state) in self.pending.items()
        }
        assert record.live[Live.KEPT_REFUSED] == self.num_refused
        live = LiveRing(ring.path)
        try:
            assert live.pending()[1] == len(self.pending)
        finally:
            live.close()


@pytest.mark.parametrize("in_c", IN_C, ids=["c", "python"])
@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(steps=STEPS, num_operations=st.integers(1, 9))
def test_what_is_pending_is_what_the_record_shows_as_pending(tmp_path, in_c, steps, num_operations):
    ring = Ring(
        tmp_path / "ring", Identity(rank=0), num_operations=num_operations, num_spans=NUM_SPANS
    )
    try:
        program = Pending(Recorder(ring, in_c=in_c))
        for kind, choice in steps:
            program.take(kind, choice)
        program.check(ring)
    finally:
        ring.close()
        ring.path.unlink()


def test_pending_operations_fill_all_places_and_none_gives_way(recorder, ring):
    """Far more of them than slots and places: the newest are refused, and counted."""
    program = Pending(recorder)
    choose = random.Random(7)
    for _ in range(2000):
        program.take(choose.choice((0, 0, 0, 6, 8)), choose.randrange(1 << 20))
    for choice in range(NUM_KEPT):
        program.take(0, choice)
    assert program.num_refused > 100
    assert len(program.pending) == NUM_OPERATIONS + NUM_KEPT
    program.check(ring)


def test_threads_lose_no_pending_operation_of_each_other(recorder, ring):
    held: list[int] = []

    def work(tag: int) -> None:
        held.append(recorder.begin(0, "recv", tag=tag))
        for _ in range(300):
            recorder.completed(recorder.begin(0, "send", tag=99))
        recorder.started(held[-1])

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # else one thread is done before the next one runs
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval_s)
    rows = read_ring(ring.path).operations
    pending = rows[rows["state"] < State.COMPLETED]
    assert sorted(pending["tag"].tolist()) == [0, 1, 2, 3]
    assert sorted(pending["record"].tolist()) == sorted(held)
    for number in held:
        recorder.completed(number)
    rows = read_ring(ring.path).operations
    assert (rows["state"] == State.COMPLETED).all()


def test_a_kept_operation_is_never_shown_with_the_signature_of_another(recorder, ring):
    """A copy of the file may hold one's slot and the signature of its successor in the place."""
    for shapes in (((4, 4),), ((5, 5),)):
        recorder.begin(0, "send", shapes=shapes)
    for _ in range(NUM_OPERATIONS):
        recorder.completed(recorder.begin(0, "barrier"))
    begin = Layout(NUM_OPERATIONS, NUM_SPANS).kept_offset
    size, at = KEPT_OPERATION.itemsize, KEPT_OPERATION.fields["length"][1]  # type: ignore[index]
    data = bytearray(ring.path.read_bytes())
    data[begin + at : begin + size] = data[begin + size + at : begin + 2 * size]
    copy = ring.path.with_name("copy")
    copy.write_bytes(data)
    record = read_ring(copy)
    kept = record.operations[:2]
    assert kept["state"].tolist() == [State.CREATED] * 2
    assert [record.signatures[i] for i in kept["signature"]] == [
        Signature(DAMAGED),
        Signature("", ((5, 5),)),
    ]
