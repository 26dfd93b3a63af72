"""Collect the black boxes of a node's ranks, and the host's facts about each process.

    1. Examine every live process once: its ring and its files in /proc.
    2. Read the stacks from outside the processes, which does not disturb them. Also examine the
       processes' descendants, such as loader workers and compilers.
    3. Send a signal only to processes whose stacks could not be read, and wait briefly for an
       answer.
    4. Examine each process again, and read every ring.
    5. For a stall, repeat these steps up to two seconds later (`second_look_s`). A rank that has
       made progress since the first time is slow, and a rank that has not is stuck.

A signal interrupts the system call in which a thread is waiting, and can end the hang that is being
examined. Signals are therefore a last resort, and `HostFacts.stacks_from` records their use.

The collection is a generator that, instead of waiting, yields the time to wait. The agent's event
loop runs in the meantime, so the agent continues to forward output and the user can stop the job at
any time.

A rank without a ring still gets a dump, which contains the exit code, the end of stderr, the stacks
and the system calls in which threads are waiting. For a torch program, a dump from torch's own
recorder is also requested.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import time
from collections.abc import Callable, Generator, Sequence

from echelon.launcher.incident.witness import Witness
from echelon.launcher.incident.worker import Occasion, Worker
from echelon.recorder.format.schema import Record

_STACKS_S = 1.0  # a stopped process never answers
_TORCH_S = 12.0  # its first dump with stacks loads hundreds of modules inside the hung process
_SECOND_LOOK_S = 2.0
_SOONEST_LOOK_S = 0.5  # fifty ticks of processor time
_SHARE_OF_STALL = 4  # of the stall timeout, if that is short
_SPY_S, _BELOW_S, _SPIES = 5.0, 3.0, 8
_SAMPLE_S = 0.3  # the shortest time for measuring the share of a core, in ticks of 10 ms

Steps = Generator[float, None, list[Record]]
Waits = Generator[float, None, None]


def second_look_s(stall_timeout_s: float) -> float:
    """Return the time between the two examinations of stalled ranks, in seconds.

    Args:
        stall_timeout_s: the time without progress that counts as a stall; 0 if stalls are ignored.
    """
    if stall_timeout_s <= 0:
        return _SECOND_LOOK_S
    return min(_SECOND_LOOK_S, max(_SOONEST_LOOK_S, stall_timeout_s / _SHARE_OF_STALL))


def harvest(
    workers: Sequence[Worker], occasion: Occasion, idle: Callable[[float], None]
) -> list[Record]:
    """Collect the black boxes of this node's workers; return them in the order of `workers`.

    The collection usually takes about one second. The maximum is about nine seconds, or twelve if
    dumps are requested from torch. For a stall, the processes are examined again after 2 s.

    Args:
        idle: a function that waits for a given number of seconds.
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
    """Collect black boxes as `harvest` does, but yield the seconds to wait instead of waiting.

    Args:
        is_urgent: a function that returns whether to stop waiting early.
        gap_s: the time between the two examinations of a stall, in seconds.

    Returns:
        The records, in the order of `workers`.
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
    """Read each process's stacks from outside it; if this fails, request them with a signal."""
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
    """Run functions on a few threads; wait up to `limit_s` seconds for all functions to return.

    If no thread can be started, no function is called.
    """
    if is_urgent() or not looks:
        return
    deadline_s = time.monotonic() + limit_s
    pool = concurrent.futures.ThreadPoolExecutor(_SPIES)
    begun: list[concurrent.futures.Future[None]] = []
    try:
        with contextlib.suppress(RuntimeError):  # the limit on processes and threads is reached
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
