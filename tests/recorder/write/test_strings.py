"""The string table: each text once, and a full table that says so."""

from __future__ import annotations

import itertools
import sys

import pytest

from echelon.recorder.format.layout import STRINGS_OFFSET
from echelon.recorder.format.schema import (
    NAMES_BYTES,
    RECENT_BYTES,
    STRINGS_BYTES,
    TABLE_FULL,
    Group,
    Live,
)
from echelon.recorder.read.ring_texts import OVERWRITTEN
from echelon.recorder.write.recorder import Recorder
from echelon.recorder.write.ring.texts import Texts


def test_a_text_is_stored_once(recorder, ring):
    before = ring.live[Live.STRINGS_USED_BYTES]
    for _ in range(3):
        recorder.begin(0, "a rather special operation")
    data = ring.path.read_bytes()[STRINGS_OFFSET : STRINGS_OFFSET + STRINGS_BYTES]
    assert data.count(b"a rather special operation") == 1
    assert ring.live[Live.STRINGS_USED_BYTES] > before


def fill(ring) -> None:
    """Fill what names may take of the table."""
    text = "x" * 4000
    for i in range(NAMES_BYTES // 4006 + 1):
        ring.texts.intern(f"{i:05d}{text}"[:4000])


def test_a_full_table_says_so_and_counts(recorder, ring, look):
    fill(ring)
    assert ring.live[Live.STRINGS_REFUSED] == 1
    recorder.begin(0, "unheard_of" * 400, sequence=5)
    record = look()
    (row,) = record.operations
    assert record.strings[row["operation"]] == TABLE_FULL
    assert row["sequence"] == 5
    assert record.live[Live.STRINGS_REFUSED] >= 2
    assert record.live[Live.STRINGS_USED_BYTES] <= NAMES_BYTES


def test_groups_and_call_sites_have_room_that_names_cannot_take(recorder, ring, look):
    fill(ring)
    for i in range(2):
        recorder.begin(recorder.group(f"group {i}", (i, 3)), "", sequence=i)
    record = look()
    assert [record.groups[row["group"]] for row in record.operations] == [
        Group("group 0", (0, 3)),
        Group("group 1", (1, 3)),
    ]
    assert all(record.strings[row["site"]].startswith(__file__) for row in record.operations)


def test_groups_stay_apart_in_a_table_that_groups_have_filled(recorder, ring, look):
    many = 1500
    references = [recorder.group(f"{i} {'x' * 900}", (i, 3)) for i in range(many)]
    assert len(set(references)) == many
    assert ring.live[Live.STRINGS_REFUSED] > 0
    for reference in references[-2:]:
        recorder.begin(reference, "barrier")
    names = [look().groups[row["group"]].name[:4] for row in look().operations]
    assert names == ["1498", "1499"]


def test_groups_whose_texts_were_overwritten_are_never_one(recorder, ring, look):
    references = [recorder.group(f"{i} {'x' * 900}", (i, 3)) for i in range(1500)]
    for reference in references[-2:]:
        recorder.begin(reference, "barrier")
    for i in range(RECENT_BYTES // 500):
        ring.texts.recent(f"{i} {'y' * 600}")
    for reference in references[-2:]:
        recorder.begin(reference, "barrier")
    record = look()
    groups = {record.groups[row["group"]] for row in record.operations}
    assert len(groups) == 2
    assert all(group.ranks == () for group in groups)


def test_details_and_errors_never_fill_the_table(recorder, ring, look):
    before = None
    for i in range(70_000):
        recorder.close_span(recorder.open_span("checkpoint", f"step {i}", 0))
        if i % 10 == 0:
            recorder.failed(recorder.begin(0, "barrier"), OSError(f"number {i}"))
        before = before or ring.live[Live.STRINGS_USED_BYTES]
    assert ring.live[Live.STRINGS_REFUSED] == 0
    assert ring.live[Live.STRINGS_USED_BYTES] == before
    record = look()
    assert record.strings[record.spans[-1]["detail"]] == "step 69999"
    assert record.strings[record.operations[-1]["error"]] == "OSError: number 69990"
    assert record.warnings == ()


def test_a_detail_that_newer_ones_replaced_says_so(recorder, ring, look):
    recorder.open_span("checkpoint", "the first", 0)
    for i in range(2000):
        ring.texts.recent(f"{i} {'y' * 600}")
    record = look()
    assert [record.strings[row["detail"]] for row in record.open_spans] == [OVERWRITTEN]


def test_operations_whose_signatures_were_replaced_leave_no_gap(recorder, ring, look):
    recorder.begin(0, "barrier", sequence=0)
    recorder.begin(0, "all_reduce", sequence=1)
    for i in range(1000):
        ring.texts.recent(f"{i} {'y' * 600}")
    recorder.begin(0, "barrier", sequence=2)  # it was met before, but not among the newest
    record = look()
    assert record.operations["sequence"].tolist() == [2]
    assert record.strings[record.operations[0]["operation"]] == "barrier"
    assert record.warnings == (
        "2 of the oldest operations were left out: newer calls overwrote their arguments",
    )


@pytest.mark.parametrize("is_in_c", [False, True], ids=["python", "c"])
def test_a_handler_that_records_a_new_text_in_the_middle_of_another(ring, look, is_in_c):
    """Whichever line of `intern` and `append` a signal interrupts: no deadlock, no damage."""
    recorder = Recorder(ring, in_c=is_in_c)
    code = {Texts.intern.__code__, Texts.append.__code__, Texts._add_name.__code__}
    code |= {Texts._append.__code__, Texts.recent.__code__}
    count = itertools.count()

    def interrupt(frame, event, arg):
        if frame.f_code not in code:
            return None
        sys.settrace(None)
        number = next(count)
        recorder.begin(0, f"inner {number}", shapes=((number,),))
        recorder.close_span(recorder.open_span("inner", f"detail {number}", 0))
        sys.settrace(interrupt)
        return interrupt

    sys.settrace(interrupt)
    try:
        recorder.begin(0, "outer", shapes=((7, 7),))
        recorder.open_span("outer", "outer detail", 0)
    finally:
        sys.settrace(None)
    assert next(count) > 20
    record = look()
    assert record.strings[record.open_spans[-1]["detail"]] in ("outer detail", TABLE_FULL)
    assert "a text is damaged" not in " ".join(record.warnings)


def test_a_long_text_is_cut_at_a_character(ring, recorder, look):
    recorder.begin(0, "é" * 5000)
    record = look()
    name = record.strings[record.operations[0]["operation"]]
    assert set(name) == {"é"}
    assert len(name) == 2000


def test_text_that_is_no_unicode_is_kept_readable(recorder, look):
    recorder.begin(0, "bad \udcff name")
    record = look()
    assert record.strings[record.operations[0]["operation"]] == "bad ? name"
