"""The line in which a job that was asked to stop reports its state."""

from __future__ import annotations

import json

import pytest

from echelon.launcher.job.resume import Checkpoint
from echelon.launcher.job.stopped import Stopped, where_it_stopped


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
