"""Collect the black boxes of a node's ranks, and what the host knows of each process.

    1. look at every living process once: its ring, /proc
    2. read the stacks from outside, which nothing in the process notices, and look at the processes
       below it: loader workers, compilers
    3. ask by signal only those whose stacks could not be read, and give them a moment to answer
    4. look again (the difference is their share of a core), read every ring
    5. for a stall, two seconds later, once more: what has moved is slow, what has not is stuck

Looking must not change what is looked at. A signal ends the system call that a thread waits in, and
with it, often, the hang: a verdict on what was gone by then would be about nothing. So it is the
last resort, and `HostFacts.stacks_from` says that it was used.

This is a generator that yields how long it wants to wait: the agent's loop continues between its
steps, so that output keeps flowing, and a user who stops the job is obeyed at once.

A rank that never opened a ring still gets a dump: its exit, its stderr, its stacks and what its
threads wait for speak. If it is a torch program, torch's own recorder is asked for its dump.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import time
from collections.abc import Callable, Generator, Sequence

from echelon.launcher.incident.witness import Witness
from echelon.launcher.incident.worker import Occasion, Worker
from echelon.recorder.format.schema import Record

_STACKS_S = 1.0  # a process stopped by a signal never answers
_TORCH_S = 12.0  # its first dump with stacks loads hundreds of modules inside the hung process
_SECOND_LOOK_S = 2.0
_SPY_S, _BELOW_S, _SPIES = 5.0, 3.0, 8
_SAMPLE_S = 0.3  # a share of a core takes so long to show, in ticks of 10 ms

Steps = Generator[float, None, list[Record]]
Waits = Generator[float, None, None]


def harvest(
    workers: Sequence[Worker], occasion: Occasion, idle: Callable[[float], None]
) -> list[Record]:
    """Collect the black boxes of this node's workers, in their order.

    Takes about a second at most, twelve where torch is asked for dumps, and two more for a stall,
    which is looked at twice: what has moved in between is slow, what has not is stuck.
    `idle(seconds)` is called while ranks answer.
    """
    steps = harvest_steps(workers, occasion, lambda: False)
    while True:
        try:
            wait_s = next(steps)
        except StopIteration as end:
            records: list[Record] = end.value
            return records
        idle(wait_s)


def harvest_steps(
    workers: Sequence[Worker],
    occasion: Occasion,
    is_urgent: Callable[[], bool],
    gap_s: float = _SECOND_LOOK_S,
) -> Steps:
    """Do what `harvest` does, step by step: yields the seconds to wait, returns the records.

    Args:
        is_urgent: once it returns True, no step waits any longer.
        gap_s: how long after the first look at a stall the second one is made.
    """
    witnesses = [Witness(worker, occasion) for worker in workers]
    asked_s = time.monotonic()
    yield from _read_stacks(witnesses, is_urgent)
    below = [witness.look_below for witness in witnesses if witness.may_wait_below]
    yield from _on_threads(below, _BELOW_S, is_urgent)
    while (
        time.monotonic() < asked_s + _TORCH_S
        and not all(witness.has_torch_answered() for witness in witnesses)
        and not is_urgent()
    ):
        yield 0.02
    if any(witness.is_seen_from_outside for witness in witnesses):
        yield from _wait_until(asked_s + _SAMPLE_S, is_urgent)
    first_look_s = time.monotonic()
    for witness in witnesses:
        witness.testify()
    if occasion.kind == "stall" and not is_urgent():
        yield from _look_again(witnesses, first_look_s + gap_s, first_look_s, is_urgent)
    return [witness.record for witness in witnesses]


def _wait_until(deadline_s: float, is_urgent: Callable[[], bool]) -> Waits:
    while (left_s := deadline_s - time.monotonic()) > 0 and not is_urgent():
        yield min(left_s, 0.1)


def _read_stacks(witnesses: Sequence[Witness], is_urgent: Callable[[], bool]) -> Waits:
    """Read all stacks from outside; ask those by signal whose stacks cannot be read so."""
    yield from _on_threads([witness.spy for witness in witnesses], _SPY_S, is_urgent)
    if is_urgent():
        return
    for witness in witnesses:
        witness.ask()
    yield from _wait_for_answers(witnesses, is_urgent)


def _wait_for_answers(witnesses: Sequence[Witness], is_urgent: Callable[[], bool]) -> Waits:
    deadline_s = time.monotonic() + _STACKS_S
    while time.monotonic() < deadline_s and not all(w.has_answered() for w in witnesses):
        if is_urgent():
            return
        yield 0.02


def _on_threads(
    looks: Sequence[Callable[[], None]], limit_s: float, is_urgent: Callable[[], bool]
) -> Waits:
    """Look at some processes at a time; what is not done after `limit_s` is left out.

    Where no thread can be started, nothing is looked at: ranks are asked by signal instead.
    """
    if is_urgent() or not looks:
        return
    deadline_s = time.monotonic() + limit_s
    pool = concurrent.futures.ThreadPoolExecutor(_SPIES)
    begun: list[concurrent.futures.Future[None]] = []
    try:
        with contextlib.suppress(RuntimeError):  # the limit of processes and threads is reached
            begun += (pool.submit(look) for look in looks)
        while not all(look.done() for look in begun) and time.monotonic() < deadline_s:
            if is_urgent():
                return
            yield 0.02
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _look_again(
    witnesses: Sequence[Witness],
    due_s: float,
    first_look_s: float,
    is_urgent: Callable[[], bool],
) -> Waits:
    yield from _wait_until(due_s, is_urgent)
    for witness in witnesses:
        witness.look()
    yield from _read_stacks(witnesses, is_urgent)
    gap_s = time.monotonic() - first_look_s
    for witness in witnesses:
        witness.testify_later(gap_s)
