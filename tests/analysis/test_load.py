"""What a folder holds is recognized, the newest complete incident taken, errors are clear."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from imagined_job import Job

from echelon.analysis import analyze
from echelon.analysis.sources.load import load, read_incident
from echelon.errors import DumpFormatError


def hung(rank: int) -> Job:
    job = Job(3).train(2)
    for other in job.others(rank):
        other.all_reduce(inside=True)
    job[rank].stands()
    return job


def culprits(path: Path) -> list[int]:
    verdict = analyze(path).verdict
    return [] if verdict is None else list(verdict.culprit_ranks)


def test_an_incident(tmp_path: Path) -> None:
    assert culprits(hung(1).write(tmp_path / "incident_0")) == [1]


@pytest.mark.parametrize("below", ["", "dump"])
def test_the_newest_complete_incident_of_a_run_or_dump_folder(tmp_path: Path, below: str) -> None:
    dump = tmp_path / "dump"
    for number in (2, 9, 10):
        hung(number % 3).write(dump / f"incident_{number}")
    hung(2).write(dump / ".incident_11.partial")
    (dump / "incident_12").mkdir()  # empty
    (dump / "latest").symlink_to("incident_2")
    assert culprits(tmp_path / below) == [1]
    assert "incident_10" in load(tmp_path / below).origin


def test_a_dump_folder_by_itself(tmp_path: Path) -> None:
    hung(0).write(tmp_path / "incident_0")
    assert culprits(tmp_path) == [0]


def test_what_the_launcher_adds_is_ignored(tmp_path: Path) -> None:
    folder = hung(1).write(tmp_path / "incident_0")
    for name in ("verdict.json", "verdict.txt", "rank_x", ".rank_0.part"):
        (folder / name).write_text("{}")
    assert culprits(folder) == [1]


def test_one_damaged_file_among_good_ones(tmp_path: Path) -> None:
    folder = hung(1).write(tmp_path / "incident_0")
    (folder / "rank_1").write_bytes(b"\x93damaged")
    report = analyze(folder)
    assert report.ranks_missing == (1,)
    assert report.verdict is not None
    assert report.verdict.culprit_ranks == (1,)
    assert any("rank_1" in warning for warning in report.warnings)


def test_why_the_launcher_has_no_dump_of_a_rank(tmp_path: Path) -> None:
    absent = {"1": "node gpu-7 is lost", "x": "y", "2": 5, "0": ""}
    folder = hung(1).lose(1).write(tmp_path / "incident_0", absent=absent)
    verdict = analyze(folder).verdict
    assert verdict is not None
    assert (verdict.cause, verdict.culprit_ranks) == ("dead_process", (1,))
    assert "rank 1 is missing: node gpu-7 is lost" in verdict.summary
    assert verdict.evidence[0] == "rank 1: node gpu-7 is lost"
    assert "machine of rank 1" in verdict.next_action


def test_a_lost_node_is_the_root_whatever_the_others_seem_to_do(tmp_path: Path) -> None:
    job = Job(4).train(2)
    job[1].all_reduce(inside=True)  # looked at a moment before rank 0, which has completed it
    job[0].all_reduce()
    folder = job.lose(2, 3).write(
        tmp_path / "incident_0",
        "failure",
        absent={"2": "node gpu-7 is lost", "3": "node gpu-7 is lost"},
        lost=[3, 2, "x", True, -1],
    )
    verdict = analyze(folder).verdict
    assert verdict is not None
    assert (verdict.cause, verdict.culprit_ranks) == ("dead_process", (2, 3))
    assert verdict.fallout_ranks == (0, 1)


def test_only_damaged_files(tmp_path: Path) -> None:
    (tmp_path / "rank_0").write_bytes(b"\x93damaged")
    with pytest.raises(DumpFormatError, match="rank_0"):
        analyze(tmp_path)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"kind": 5, "number": "x"}', "[" * 100_000])
def test_a_broken_incident_json_costs_nothing_else(tmp_path: Path, content: str) -> None:
    folder = hung(1).write(tmp_path / "incident_0")
    (folder / "incident.json").write_text(content)
    assert culprits(folder) == [1]


def test_incident_json(tmp_path: Path) -> None:
    path = tmp_path / "incident.json"
    path.write_text(json.dumps({"kind": "stall", "number": 3, "attempt": 1, "world_size": 8}))
    incident = read_incident(path)
    assert (incident.kind, incident.number, incident.attempt, incident.world_size) == (
        "stall",
        3,
        1,
        8,
    )


def test_a_rank_without_a_file_counts_by_the_world_size(tmp_path: Path) -> None:
    job = hung(1)
    folder = job.lose(1).write(tmp_path / "incident_0")
    assert analyze(folder).ranks_missing == (1,)


def test_no_such_folder(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such folder"):
        analyze(tmp_path / "nothing")


def test_an_empty_folder(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no dumps in a known format"):
        analyze(tmp_path)


def test_final_rings_of_the_newest_attempt(tmp_path: Path) -> None:
    from echelon.recorder.format.schema import Identity
    from echelon.recorder.write.ring.ring import Ring

    for attempt in (0, 1):
        for rank in range(2):
            folder = tmp_path / f"rank_{rank}" / f"attempt_{attempt}"
            folder.mkdir(parents=True)
            identity = Identity(rank=rank, world_size=2, attempt=attempt)
            Ring(folder / "ring", identity, num_operations=16, num_spans=16).close()
    report = analyze(tmp_path)
    assert report.healthy
    assert report.ranks_present == (0, 1)
    assert "attempt 1" in report.origin


def test_one_file(tmp_path: Path) -> None:
    folder = hung(1).write(tmp_path / "incident_0")
    assert analyze(folder / "rank_0").ranks_present == (0,)


def test_the_coordinators_order_of_ends_is_read(tmp_path: Path) -> None:
    ended = [[3, -6, 1], [1, 1, 0], [2, None, 2], "x", [4], [5, 0, "a"]]
    told = {"kind": "failure", "ended": ended}
    (tmp_path / "incident.json").write_text(json.dumps(told))
    assert read_incident(tmp_path / "incident.json").ended == (1, 3, 2)


def test_an_incident_to_which_no_node_sent_a_black_box_says_why(tmp_path: Path) -> None:
    late = {"0": "its node did not answer in time", "1": "its node did not answer in time"}
    told = {"kind": "failure", "world_size": 2, "reason": "rank 1 failed", "ranks_absent": late}
    (tmp_path / "incident.json").write_text(json.dumps(told))
    report = analyze(tmp_path)
    assert report.verdict is not None
    assert report.verdict.cause.value == "unknown"
    assert "ranks 0 and 1 sent no black box: its node did not answer in time" in (
        report.verdict.evidence
    )
    assert "has no black box" in report.origin
