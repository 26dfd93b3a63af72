"""Our own records may be forged or broken too: nothing grows without bound, nothing falls over."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from imagined_job import Job

from echelon.analysis import analyze
from echelon.analysis.diagnose import diagnose
from echelon.analysis.evidence.model import Incident
from echelon.analysis.evidence.picture import take_picture
from echelon.analysis.evidence.stacks.frames import Frame, main_thread
from echelon.analysis.finding import Report
from echelon.analysis.report.page.render import render_html
from echelon.analysis.report.trace import events
from echelon.analysis.sources.builder import EvidenceBuilder
from echelon.errors import DumpFormatError
from echelon.recorder.format.schema import Record

HUGE = 2**62


def story() -> Job:
    job = Job(4).train(3)
    for rank in job.others(2):
        rank.all_reduce(inside=True)
    job[2].stands()
    return job


def judged(records: list[Record]) -> Report:
    """Analyze records, and draw them too: no output may fall over either."""
    builder = EvidenceBuilder()
    for record in records:
        builder.add(record)
    evidence = builder.build(incident=Incident(kind="stall"))
    picture = take_picture(evidence)
    report = diagnose(evidence)
    assert render_html(picture, report)
    assert sum(1 for _ in events(evidence)) > 0
    return report


def with_column(record: Record, name: str, value: int) -> Record:
    operations = record.operations.copy()
    operations[name][-1] = value
    return replace(record, operations=operations)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("sequence", HUGE),
        ("sequence", 10**9),
        ("created_mono_ns", HUGE),
        ("created_mono_ns", -HUGE),
        ("completed_mono_ns", HUGE),
        ("step", HUGE),
        ("peer", 2**31 - 1),
        ("root", 2**31 - 1),
        ("num_bytes", -HUGE),
        ("state", 200),
        ("flags", 65535),
        ("p2p_sequence", HUGE),
    ],
)
@pytest.mark.parametrize("forger", [0, 2])
def test_forged_numbers(name: str, value: int, forger: int) -> None:
    records = story().records()
    records[forger] = with_column(records[forger], name, value)
    report = judged(records)
    assert report.ranks_present == (0, 1, 2, 3)


@pytest.mark.parametrize("world_size", [10**9, 2**63, 0, -5])
def test_a_forged_world_size_is_bounded(world_size: int) -> None:
    job = story()
    records = job.records()
    records[1] = replace(records[1], identity=records[1].identity.changed(world_size=world_size))
    report = judged(records)
    assert 4 <= report.world_size <= 1 << 18


@pytest.mark.parametrize("rank", [-1, 10**9])
def test_a_rank_that_cannot_be_is_left_out(rank: int) -> None:
    records = story().records()
    records[1] = replace(records[1], identity=records[1].identity.changed(rank=rank))
    report = judged(records)
    assert report.ranks_present == (0, 2, 3)
    assert any("left out" in warning for warning in report.warnings)


@pytest.mark.parametrize("offset", [2**70, -(2**70)])
def test_a_clock_beyond_all_clocks_costs_that_record_only(offset: int) -> None:
    records = story().records()
    records[1] = replace(records[1], identity=records[1].identity.changed(clock_offset_ns=offset))
    report = judged(records)
    assert 1 not in report.ranks_present


def test_two_records_of_one_rank() -> None:
    records = story().records()
    report = judged([*records, records[0]])
    assert any("second record of rank 0" in warning for warning in report.warnings)


def test_groups_named_like_paths_are_only_names(tmp_path: Path) -> None:
    job = Job(2)
    for rank in job.ranks:
        rank.all_reduce(group="../../../../etc/passwd", inside=rank.rank == 0)
    before = set(tmp_path.rglob("*"))
    assert judged(job.records()).world_size == 2
    assert set(tmp_path.rglob("*")) == before


def test_groups_with_members_that_are_not_there() -> None:
    job = Job(2)
    for rank in job.ranks:
        rank.all_reduce(group="all", ranks=(0, 1, 5, 70_000), inside=True)
    verdict = judged(job.records()).verdict
    assert verdict is not None
    assert set(verdict.culprit_ranks) == {5, 70_000}


def test_thousands_of_groups_and_calls() -> None:
    job = Job(2)
    for rank in job.ranks:
        for number in range(400):
            rank.all_reduce(group=f"g{number}", ranks=(0, 1), shape=(number,))
    assert judged(job.records()).world_size == 2


@pytest.mark.parametrize(
    "stacks",
    [
        "Thread 0x1 (most recent call first):\n" + '  File "x", line 1 in f\n' * 20_000,
        "Thread 0x1 (most recent call first):\n" * 20_000,
        '  File "' + "/Python.framework/" * 50_000 + '", line 1 in f',
        "\x00\x1b" * 100_000,
    ],
    ids=["deep", "many", "slow", "binary"],
)
def test_stacks_of_any_size(stacks: str) -> None:
    job = story()
    job[2].host["stacks"] = stacks
    assert judged(job.records()).verdict is not None


def test_a_path_made_to_be_slow() -> None:
    assert Frame("/Python.framework/" * 50_000 + "x", 1, "f").is_users
    main_thread("Thread 0x1 (most recent call first):\n" + ":" * 500_000)


@pytest.mark.parametrize("size", [0, 1, 7, 100, 1000])
def test_dumps_cut_off_anywhere(tmp_path: Path, size: int) -> None:
    folder = story().write(tmp_path / "incident_0")
    path = folder / "rank_2"
    path.write_bytes(path.read_bytes()[:size])
    report = analyze(folder)
    assert report.ranks_missing == (2,)
    assert any("rank_2" in warning for warning in report.warnings)


def test_bytes_flipped_anywhere(tmp_path: Path) -> None:
    folder = story().write(tmp_path / "incident_0")
    path = folder / "rank_2"
    whole = path.read_bytes()
    random = np.random.default_rng(7)
    for _ in range(60):
        data = bytearray(whole)
        data[int(random.integers(len(data)))] ^= int(random.integers(1, 256))
        path.write_bytes(data)
        assert analyze(folder).world_size >= 4


def test_things_that_are_no_files(tmp_path: Path) -> None:
    folder = story().write(tmp_path / "incident_0")
    (folder / "rank_2").unlink()
    (folder / "rank_2").mkdir()
    if hasattr(os, "mkfifo"):
        os.mkfifo(folder / "rank_3_fifo")
        (folder / "rank_3").unlink()
        os.mkfifo(folder / "rank_3")  # reading it would block for ever
    assert 2 in analyze(folder).ranks_missing


def test_only_a_pipe(tmp_path: Path) -> None:
    if not hasattr(os, "mkfifo"):
        pytest.skip("no named pipes on this system")
    os.mkfifo(tmp_path / "rank_0")
    with pytest.raises((ValueError, DumpFormatError)):
        analyze(tmp_path)
    with pytest.raises((ValueError, DumpFormatError)):
        analyze(tmp_path / "rank_0")
