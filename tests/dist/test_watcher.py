"""The thread that looks after the operations of all groups."""

from __future__ import annotations

import threading
import weakref

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


class _Watched:
    """Something to look after until it is released; it notes that it was looked at."""

    def __init__(self) -> None:
        self.seen, self.is_over = threading.Event(), False

    def tick(self) -> bool:
        self.seen.set()
        return not self.is_over


class _LockAfter:
    """A lock before which something happens the first time."""

    def __init__(self, lock, happen) -> None:
        self._lock, self._happen = lock, [happen]

    def __enter__(self):
        while self._happen:
            self._happen.pop()()
        return self._lock.__enter__()

    def __exit__(self, *args):
        return self._lock.__exit__(*args)


def test_the_end_of_one_group_leaves_the_watch_of_one_that_begins_beside_it():
    watcher = Watcher()
    first, second = _Watched(), _Watched()
    watcher.add(first)
    assert first.seen.wait(30)
    begin = threading.Thread(target=watcher.add, args=(second,))

    def begin_beside() -> None:
        begin.start()
        begin.join(30)

    watcher._guard = _LockAfter(watcher._guard, begin_beside)
    watcher.remove(first)
    second.seen.clear()  # whatever the thread that was to end has still seen
    assert second.seen.wait(30), "nothing looks after the second group"
    watcher.remove(second)


class _Slow(weakref.WeakSet):
    """A set during whose iteration another thread tries to add to it."""

    add_beside = None

    def __iter__(self):
        for one in super().__iter__():
            if self.add_beside is not None:
                beside = threading.Thread(target=self.add_beside)
                self.add_beside = None
                beside.start()
                beside.join(0.2)  # it waits where the set is guarded, and goes on afterwards
            yield one


def test_a_group_that_begins_while_it_looks_leaves_its_thread_alive():
    watcher = Watcher()
    watched = watcher._watched = _Slow()
    first, second = _Watched(), _Watched()
    watched.add_beside = lambda: watcher.add(second)
    watcher.add(first)
    assert second.seen.wait(30), "its thread has ended"
    watcher.remove(first)
    watcher.remove(second)
