"""The string table: each text once, and a full table that says so."""

from __future__ import annotations

from echelon.recorder.layout import STRINGS_OFFSET
from echelon.recorder.schema import STRINGS_BYTES, TABLE_FULL, Live


def test_a_text_is_stored_once(recorder, ring):
    before = ring.live[Live.STRINGS_USED_BYTES]
    for _ in range(3):
        recorder.begin(0, "a rather special operation")
    data = ring.path.read_bytes()[STRINGS_OFFSET : STRINGS_OFFSET + STRINGS_BYTES]
    assert data.count(b"a rather special operation") == 1
    assert ring.live[Live.STRINGS_USED_BYTES] > before


def test_a_full_table_says_so_and_counts(recorder, ring, look):
    text = "x" * 4000
    for i in range(STRINGS_BYTES // 4000):
        ring.intern(f"{i:05d}{text}"[:4000])
    assert ring.live[Live.STRINGS_REFUSED] == 1
    recorder.begin(0, "unheard_of" * 400, sequence=5)
    record = look()
    (row,) = record.operations
    assert record.strings[row["operation"]] == TABLE_FULL
    assert row["sequence"] == 5
    assert record.live[Live.STRINGS_REFUSED] >= 2
    assert record.live[Live.STRINGS_USED_BYTES] <= STRINGS_BYTES


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
