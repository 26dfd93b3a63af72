"""Damaged files: a clear error or a partial result that says so; no crash, no made-up data."""

from __future__ import annotations

import random

import msgpack
import numpy as np
import pytest

from echelon.errors import DumpFormatError
from echelon.recorder.format.layout import LIVE_BYTES, LIVE_OFFSET, Layout
from echelon.recorder.format.schema import Flag, Identity, LastWords, Record, State
from echelon.recorder.read import LiveRing, read, read_dump, read_ring
from echelon.recorder.read.dump import write_dump
from echelon.recorder.read.ring_texts import DAMAGED
from echelon.recorder.write.recorder import Recorder
from echelon.recorder.write.ring.ring import Ring
from tests.recorder.conftest import NUM_OPERATIONS, NUM_SPANS

NUM_SEEDS = 250


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> tuple[bytes, bytes]:
    """A ring with something of everything in it, and its dump."""
    folder = tmp_path_factory.mktemp("good")
    ring = Ring(
        folder / "ring",
        Identity(rank=3, host="node-7"),
        num_operations=NUM_OPERATIONS,
        num_spans=NUM_SPANS,
    )
    recorder = Recorder(ring)
    for i in range(NUM_OPERATIONS + 3):
        recorder.step()
        number = recorder.begin(
            recorder.group("dp", (1, 3)),
            ("all_reduce", "all_gather")[i % 2],
            sequence=i,
            dtype="float32",
            shapes=((i, 2),),
            reduce_op="sum",
            flags=Flag.ASYNC,
        )
        recorder.started(number)
        recorder.completed(number)
    recorder.failed(recorder.begin(0, "send", p2p_sequence=0, peer=1), OSError("gone"))
    with_spans = [recorder.open_span(name, "detail", 0) for name in ("compute", "store")]
    recorder.close_span(with_spans.pop())
    ring.write_last_words(
        LastWords(type="KeyError", message="m", site="f.py:1 f", traceback="t", mono_ns=5)
    )
    write_dump(read_ring(ring.path), folder / "dump")
    ring.close()
    return (folder / "ring").read_bytes(), (folder / "dump").read_bytes()


def told(record: Record) -> dict[str, list[tuple]]:
    """Spell a record out, so that two can be compared whatever their tables' order."""
    strings = record.strings
    operations = []
    for row in record.operations:
        texts = [strings[row[n]] for n in ("operation", "reduce_op", "site", "stack", "error")]
        rest = [
            int(row[n])
            for n in row.dtype.names
            if n
            not in ("operation", "reduce_op", "site", "stack", "error", "group", "signature")
        ]  # fmt: skip
        group, signature = record.groups[row["group"]], record.signatures[row["signature"]]
        operations.append((texts, group, signature, rest))
    spans = []
    for row in [*record.spans, *record.open_spans]:
        texts = [strings[row[n]] for n in ("name", "detail", "site")]
        rest = [int(row[n]) for n in row.dtype.names if n not in ("name", "detail", "site")]
        spans.append((texts, rest))
    return {"operations": operations, "spans": spans}


def agrees(seen: Record, truth: Record) -> None:
    """Check that what was read is the truth, or marked as damaged, or left out with a warning."""
    told_truth, told_seen = told(truth), told(seen)
    whole = {int(row["record"]): i for i, row in enumerate(truth.operations)}
    for row, (texts, group, signature, rest) in zip(
        seen.operations, told_seen["operations"], strict=True
    ):
        assert int(row["record"]) in whole
        true_texts, true_group, true_signature, true_rest = told_truth["operations"][
            whole[int(row["record"])]
        ]
        for text, true_text in zip(texts, true_texts, strict=True):
            # A state cell that was lost takes the error's text with it.
            assert text in (true_text, DAMAGED, "")
        assert group == true_group or group.name.split()[0] == DAMAGED
        assert signature == true_signature or signature.dtype == DAMAGED
        if row["state"] == State.CREATED:
            assert row["started_mono_ns"] == row["completed_mono_ns"] == 0
        else:
            assert rest == true_rest
    for texts, rest in told_seen["spans"]:
        (match,) = [one for one in told_truth["spans"] if one[1] == rest]
        assert all(t in (u, DAMAGED) for t, u in zip(texts, match[0], strict=True))
    assert seen.identity == truth.identity
    assert seen.last_words in (truth.last_words, None)
    if told_seen != told_truth or seen.last_words != truth.last_words:
        assert seen.warnings


def damage(data: bytes, seed: int, avoid: range) -> bytes:
    """Change 1 to 8 bytes, or cut the file: where something is written more often than not."""
    choose = random.Random(seed)
    if choose.random() < 0.1:
        return data[: choose.randrange(len(data))]
    used = np.flatnonzero(np.frombuffer(data, np.uint8))
    out = bytearray(data)
    at = int(used[choose.randrange(len(used))]) + choose.choice((0, 0, 0, 1, -1))
    if choose.random() < 0.1:
        at = choose.randrange(len(data))
    for i in range(at, min(at + choose.choice((1, 1, 2, 8)), len(data))):
        if i not in avoid:
            out[i] = choose.choice((0, 0xFF, out[i] ^ (1 << choose.randrange(8))))
    return bytes(out)


# The live words are single stores without a checksum: they may lie, so they are not put to this.
LIVE_WORDS = range(LIVE_OFFSET, LIVE_OFFSET + LIVE_BYTES)


def test_a_damaged_ring_is_an_error_or_a_part_of_the_truth(good, tmp_path):
    path = tmp_path / "ring"
    path.write_bytes(good[0])
    truth = read_ring(path)
    assert truth.warnings == ()
    partial, messages = 0, []
    for seed in range(NUM_SEEDS):
        path.write_bytes(damage(good[0], seed, avoid=LIVE_WORDS))
        try:
            seen = read(path)
        except DumpFormatError as err:
            messages.append(str(err))
            continue
        agrees(seen, truth)
        partial += bool(seen.warnings)
    assert partial > NUM_SEEDS // 10
    assert len(messages) > NUM_SEEDS // 20
    assert all(str(path) in text and "\n" not in text for text in messages)


def test_live_words_that_lie_crash_nothing(good, tmp_path):
    path = tmp_path / "ring"
    for seed in range(50):
        data = bytearray(good[0])
        data[LIVE_WORDS.start : LIVE_WORDS.stop] = random.Random(seed).randbytes(LIVE_BYTES)
        path.write_bytes(data)
        record = read_ring(path)
        assert record.operations["record"].tolist() == list(range(4, 12))
        live = LiveRing(path)
        live.pending()
        live.close()


def test_a_damaged_dump_is_an_error_never_other_data(good, tmp_path):
    path = tmp_path / "dump"
    path.write_bytes(good[1])
    truth = told(read_dump(path))
    for seed in range(NUM_SEEDS):
        data = damage(good[1], seed, avoid=range(0))
        path.write_bytes(data)
        if data == good[1]:
            assert told(read(path)) == truth
            continue
        with pytest.raises(DumpFormatError) as caught:
            read(path)
        assert str(path) in str(caught.value)


def test_a_dump_whose_checksum_was_made_to_fit_is_still_checked(good, tmp_path):
    """Someone who writes a valid checksum over nonsense gets an error, not a crash."""
    from zlib import crc32

    path = tmp_path / "dump"
    read_ones = 0
    for seed in range(NUM_SEEDS):
        data = damage(good[1], seed, avoid=range(len(good[1]) - 12, len(good[1])))[:-4]
        path.write_bytes(data + crc32(data).to_bytes(4, "little"))
        try:
            told(read(path))
            read_ones += 1
        except DumpFormatError:
            pass
    assert read_ones


@pytest.mark.parametrize(
    "data",
    [b"", b"\x00" * 10_000, b"not one of ours", b"\x80\x04N.", b"\x93\x01\x02\x03", b"ECHELRNG"],
    ids=["empty", "zeros", "text", "pickle", "msgpack list", "magic alone"],
)
def test_foreign_files_are_refused(data, tmp_path):
    path = tmp_path / "file"
    path.write_bytes(data)
    with pytest.raises(DumpFormatError, match="not an echelon"):
        read(path)
    with pytest.raises(DumpFormatError):
        LiveRing(path)


@pytest.mark.parametrize("name", ["missing", ""])
def test_no_file_is_the_same_error(name, tmp_path):
    for reader in (read, read_ring, read_dump, LiveRing):
        with pytest.raises(DumpFormatError):
            reader(tmp_path / name)


def test_a_torn_identity_leaves_the_one_before_it(ring):
    recorder = Recorder(ring)
    recorder.identify(world_size=16)
    recorder.last_words(KeyError, KeyError("x"), None)
    recorder.identify(world_size=32)
    record = read_ring(ring.path)
    assert (record.identity.world_size, record.warnings) == (32, ())
    newest = ring.path.read_bytes().index(b'"world_size":32')
    with ring.path.open("r+b") as file:
        file.seek(newest)
        file.write(b"?")
    record = read_ring(ring.path)
    assert record.identity.world_size == 16
    assert record.warnings == ("one copy of the identity is damaged; using the other copy",)


def test_a_truncated_ring_says_so(good, tmp_path):
    path = tmp_path / "ring"
    path.write_bytes(good[0][: Layout(NUM_OPERATIONS, NUM_SPANS).operations_offset + 100])
    with pytest.raises(DumpFormatError, match="truncated"):
        read(path)


def test_a_ring_of_a_newer_major_is_refused(good, tmp_path):
    data = bytearray(good[0])
    data[8:10] = (3).to_bytes(2, "little")
    (tmp_path / "ring").write_bytes(data)
    with pytest.raises(
        DumpFormatError, match=r"format 3\.\d+, but this version of echelon reads 2\.x"
    ):
        read(tmp_path / "ring")


def test_huge_counts_in_a_dump_allocate_nothing(good, tmp_path):
    top = msgpack.unpackb(good[1])
    top["operations"]["length"] = 1 << 60
    top["groups"] = [["world", "0-9999999999"]]
    path = tmp_path / "dump"
    path.write_bytes(with_checksum(top))
    with pytest.raises(DumpFormatError, match="damaged dump"):
        read(path)


def with_checksum(top: dict) -> bytes:
    from zlib import crc32

    del top["crc32"]
    data = msgpack.packb({**top, "crc32": bytes(4)})[:-4]
    return data + crc32(data).to_bytes(4, "little")
