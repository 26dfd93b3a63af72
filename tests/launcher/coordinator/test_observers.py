"""Observers of a job: each receives everything, and one that fails is removed with one line."""

from __future__ import annotations

from echelon.launcher.coordinator import observers as o


def test_an_observer_that_fails_is_left_out_and_the_others_are_told_on():
    said, seen = [], []

    def broken(_):
        raise OSError("disk full")

    observers = o.Observers(said.append, [broken, seen.append])
    first = o.StallCleared(attempt=0)
    last = o.JobEnded(ended_by="worker", exit_code=0, error="")
    observers.tell(first)
    observers.tell(last)
    assert seen == [first, last]
    assert said == ["a report about the job failed and is omitted: OSError: disk full"]
