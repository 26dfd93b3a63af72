"""The line in which a job that was asked to stop reports its state."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from echelon.launcher.job.resume import Checkpoint
from echelon.launcher.job.stopped import Stopped, where_it_stopped
from echelon.recorder.format.schema import Identity
from echelon.recorder.write.recorder import Recorder
from echelon.recorder.write.ring.ring import Ring


@pytest.mark.parametrize(
    ("stopped", "line"),
    [
        (Stopped(), ""),
        (Stopped(last_step=9), "stopped at step 9; nothing was saved in this attempt"),
        (Stopped(last_step=9, saved=Checkpoint("gpt")), "saved in gpt"),
        (
            Stopped(last_step=9, saved=Checkpoint("gpt", 9)),
            "saved at step 9 in gpt: a requeued job continues there",
        ),
        (
            Stopped(last_step=9, saved=Checkpoint("gpt", 5)),
            "stopped at step 9; the newest checkpoint is of step 5: gpt",
        ),
        (
            Stopped(saved=Checkpoint("gpt", 5)),
            "saved at step 5 in gpt: a requeued job continues there",
        ),
    ],
)
def test_the_line(stopped, line):
    assert stopped.line() == line


def test_nothing_is_known_of_a_job_without_a_black_box(tmp_path):
    assert where_it_stopped(tmp_path, 0) == Stopped()
    folder = tmp_path / "rank_0" / "attempt_0"
    folder.mkdir(parents=True)
    (folder / "ring").write_bytes(b"torn")
    (folder / "checkpoint.json").write_text(json.dumps({"path": "gpt", "step": 5}))
    found = where_it_stopped(tmp_path, 0)
    assert found.to_json() == {"last_step": None, "saved_at_step": 5, "checkpoint": "gpt"}


def _records(folder: Path, last_step: int | None) -> None:
    """Write the ring of a process that has begun a step, or none."""
    folder.mkdir(parents=True)
    recorder = Recorder(Ring(folder / "ring", Identity(rank=0), num_operations=16, num_spans=16))
    if last_step is not None:
        recorder.step(last_step)
    recorder.close()


def test_a_rank_that_replaces_rank_0_continues_what_the_lost_one_had_done(tmp_path):
    """It has announced no checkpoint yet, and has begun no step."""
    rank_dir = tmp_path / "rank_0"
    for folder, last_step, saved in (("lost_0_of_attempt_0", 3, 2), ("lost_1_of_attempt_0", 7, 6)):
        _records(rank_dir / folder, last_step)
        (rank_dir / folder / "checkpoint.json").write_text(json.dumps({"path": "x", "step": saved}))
    _records(rank_dir / "attempt_0", None)
    _records(rank_dir / "lost_0_of_attempt_1", 99)
    found = where_it_stopped(tmp_path, 0)
    assert found == Stopped(last_step=7, saved=Checkpoint("x", 6))
