"""The thread that looks after the operations of all groups."""

from __future__ import annotations

import threading

from echelon.dist.progress.watcher import Watcher


def test_a_thread_without_jobs_does_not_hide_another_ones_job():
    watcher = Watcher()
    begun, released, done = threading.Event(), threading.Event(), threading.Event()

    def job() -> None:
        begun.set()
        released.wait(30)
        done.set()

    watcher.post(job)
    assert begun.wait(30)
    looking = threading.Thread(
        target=watcher._run_jobs
    )  # one that is to end, as `remove` leaves it
    looking.start()
    looking.join(30)
    released_soon = threading.Timer(0.1, released.set)
    released_soon.start()
    watcher.flush(30)
    assert done.is_set(), "flush returned while the job was running"
    released_soon.join(30)
    watcher.remove(watcher)  # type: ignore[arg-type]
