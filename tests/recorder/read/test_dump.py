"""Dump files: what goes in comes out, and what other versions wrote is read or refused clearly."""

from __future__ import annotations

from dataclasses import asdict, replace

import msgpack
import numpy as np
import pytest

from echelon.errors import DumpFormatError
from echelon.recorder.format.schema import (
    FORMAT_MAJOR,
    FORMAT_MINOR,
    HostFacts,
    Identity,
    LastWords,
    Record,
    Signature,
)
from echelon.recorder.read import read, read_dump, read_ring
from echelon.recorder.read.dump import empty_record, write_dump
from tests.recorder.read.test_damaged import good, told, with_checksum  # noqa: F401 -- a fixture


@pytest.fixture
def record(good, tmp_path) -> Record:  # noqa: F811
    (tmp_path / "ring").write_bytes(good[0])
    return replace(
        read_ring(tmp_path / "ring"),
        host=HostFacts(
            alive=False,
            exit_code=-9,
            process_state="Z",
            cpu_share=0.25,
            stacks="Thread 1",
            not_permitted=("wchan",),
        ),
        dumped_mono_ns=77,
        warnings=("one",),
    )


def test_a_record_comes_back_from_its_dump(record, tmp_path):
    write_dump(record, tmp_path / "dump")
    back = read(tmp_path / "dump")
    assert told(back) == told(record)
    for name in ("identity", "host", "last_words", "live", "dumped_mono_ns", "has_ring"):
        assert getattr(back, name) == getattr(record, name), name
    assert back.warnings == ("one",)
    assert [asdict(one) for one in back.signatures] == [asdict(one) for one in record.signatures]


def test_a_summarized_signature_comes_back(record, tmp_path):
    signatures = [*record.signatures[:-1], Signature("int8", summary=(9, 1 << 40, 0xFFFFFFFF))]
    write_dump(replace(record, signatures=signatures), tmp_path / "dump")
    assert read_dump(tmp_path / "dump").signatures[-1] == signatures[-1]


def test_a_rank_without_a_ring_has_a_dump(tmp_path):
    path = tmp_path / "rank_2"
    nothing = empty_record(path, Identity(rank=2), HostFacts(exit_code=1), "no ring")
    write_dump(nothing, path)
    back = read_dump(path)
    assert (back.identity.rank, back.host.exit_code, back.has_ring) == (2, 1, False)
    assert len(back.operations) == len(back.spans) == 0
    assert back.warnings == ("no ring",)


def test_a_half_written_dump_is_never_seen(record, tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(OSError, match="No space"):
        write_dump(record, tmp_path / "dump")
    assert not (tmp_path / "dump").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ring"]


def changed(record: Record, path, change) -> None:
    write_dump(record, path)
    top = msgpack.unpackb(path.read_bytes())
    change(top)
    path.write_bytes(with_checksum(top))


def test_a_newer_major_is_refused_with_both_versions(record, tmp_path):
    path = tmp_path / "dump"
    changed(record, path, lambda top: top.update(version=[FORMAT_MAJOR + 1, 0]))
    with pytest.raises(DumpFormatError, match=rf"format {FORMAT_MAJOR + 1}\.0.*{FORMAT_MAJOR}\.x"):
        read(path)


def test_a_newer_minor_with_unknown_parts_is_read(record, tmp_path):
    def change(top: dict) -> None:
        top["version"] = [FORMAT_MAJOR, FORMAT_MINOR + 5]
        top["weather"] = "fine"
        top["identity"]["color"] = "red"
        top["host"]["humidity"] = 0.4
        top["last_words"]["language"] = "en"
        top["live"] += [1, 2, 3]
        length = top["operations"]["length"]
        top["operations"]["columns"]["mood"] = np.zeros(length, "<u4").tobytes()

    path = tmp_path / "dump"
    changed(record, path, change)
    back = read(path)
    assert told(back) == told(record)
    assert back.live == record.live


def test_an_older_minor_without_newer_parts_is_read(record, tmp_path):
    def change(top: dict) -> None:
        top["version"] = [FORMAT_MAJOR, 0]
        del top["operations"]["columns"]["stack"]
        del top["host"]["cpu_share"]
        top["live"] = top["live"][:11]

    path = tmp_path / "dump"
    changed(record, path, change)
    back = read(path)
    assert len(back.operations) == len(record.operations)
    assert set(back.operations["stack"]) == {0}
    assert back.host.cpu_share is None
    assert back.live[:11] == record.live[:11]


@pytest.mark.parametrize(
    "change",
    [
        lambda top: top.pop("identity"),
        lambda top: top["identity"].update(rank="three"),
        lambda top: top["identity"].pop("rank"),
        lambda top: top["operations"]["columns"].update(group=b"\xff" * 4 * 8),
        lambda top: top["operations"]["columns"].update(group=b""),
        lambda top: top["operations"].update(columns={}),
        lambda top: top.update(strings=5),
        lambda top: top.update(groups=[["world", "0-3:0"]]),
        lambda top: top.update(signatures=[["float32", [["x"]], [], [], None]]),
        lambda top: top.update(version="1"),
        lambda top: top.update(version=[]),
        lambda top: top.update(live=[1 << 63, "x"]),
        lambda top: top["host"].update(not_permitted=[5]),
    ],
)
def test_a_dump_of_wrong_types_is_refused(record, tmp_path, change):
    path = tmp_path / "dump"
    changed(record, path, change)
    with pytest.raises(DumpFormatError) as caught:
        read(path)
    assert str(path) in str(caught.value)


def test_last_words_come_back(record, tmp_path):
    words = LastWords(
        type="a.B", message="", site="x.py:1 f", traceback="", mono_ns=1, bases=("c.D", "e.F")
    )
    write_dump(replace(record, last_words=words), tmp_path / "dump")
    assert read_dump(tmp_path / "dump").last_words == words
