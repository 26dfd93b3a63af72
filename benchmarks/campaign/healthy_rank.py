"""Run as one rank of a healthy job: mostly idle, with real collectives and the pauses of training.

    healthy_rank.py KIND SEED MINUTES SCALE FILE

All delays are drawn from the seed: uneven steps, slow batches, evaluations, checkpoints and
compilations, on all ranks or on one of them while the others wait for it. SCALE shortens the pauses
of a job with a shorter `--stall-timeout`. Rank 0 writes its steps and pauses to FILE.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

Span = Callable[[str], AbstractContextManager[object]]
_SLICE_S = 0.5
_BUSY = 0.04  # of a pause that no span marks: an evaluation without any processor time is none


class Pauses:
    """The job's pauses; all ranks draw the same pauses, but each draws its own durations."""

    def __init__(self, seed: str, rank: int, size: int, scale: float, span: Span | None) -> None:
        self._shared, self._own = random.Random(seed), random.Random(f"{seed} {rank}")
        self._rank, self._size, self._scale = rank, size, scale
        self._span = span
        self.done = Counter[str]()
        self.longest_s = 0.0

    def first_step(self) -> None:
        """Simulate compilation, which is long and not equally long on all ranks."""
        self._pause("compile", self._own.uniform(20, 45))

    def step(self) -> None:
        """Simulate the work of one step; about one step in 45 has a pause."""
        time.sleep(0.3 + self._own.lognormvariate(-2.5, 0.8))
        if self._own.random() < 0.004:
            self._pause("data_wait", min(2 * self._own.paretovariate(1.3), 30))
        draw, victim = self._shared.random(), self._shared.randrange(self._size)
        if draw < 0.006:
            self._pause("evaluate", self._own.uniform(15, 40))
        elif draw < 0.008 and self._rank == victim:
            self._pause("evaluate", self._own.uniform(10, 40))
        elif draw < 0.018:
            self._pause("checkpoint", self._own.uniform(2, 12))
        elif draw < 0.020 and self._rank == victim:
            self._pause("checkpoint", self._own.uniform(5, 40))
        elif draw < 0.021:
            self._pause("compile", self._own.uniform(5, 45) if self._own.random() < 0.5 else 0)

    def _pause(self, name: str, seconds: float) -> None:
        seconds *= self._scale
        self.done[name] += 1
        self.longest_s = max(self.longest_s, seconds)
        if self._span is not None:
            with self._span(name):
                time.sleep(seconds)
            return
        until_s = time.monotonic() + seconds
        while (left_s := until_s - time.monotonic()) > 0:
            _compute(_SLICE_S * _BUSY)
            time.sleep(min(left_s, _SLICE_S))


def _compute(seconds: float) -> None:
    until_s = time.thread_time() + seconds
    while time.thread_time() < until_s:
        sum(range(1000))


def train_numpy(pauses_of: Callable[[int, int], Pauses], minutes: float) -> tuple[int, Pauses]:
    """Train with echelon's collectives; return the number of steps."""
    import numpy as np

    from echelon import dist, recorder

    world = dist.init(timeout_s=600)
    pauses = pauses_of(world.rank, world.size)
    until_s = time.monotonic() + minutes * 60
    gradient, stop, step = np.ones(4096, np.float32), np.zeros(1), 0
    while not stop[0]:
        recorder.step(step)
        pauses.first_step() if step == 0 else pauses.step()
        world.all_reduce(gradient)
        gradient /= world.size
        if step % 10 == 0:
            world.broadcast(gradient, 0)
        if step % 50 == 0:
            world.barrier()
        stop[0] = world.rank == 0 and time.monotonic() >= until_s
        world.broadcast(stop, 0)
        step += 1
    world.barrier()
    dist.shutdown()
    return step, pauses


def train_torch(pauses_of: Callable[[int, int], Pauses], minutes: float) -> tuple[int, Pauses]:
    """Train an unmodified torch program with a compiled model; return the number of steps."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    pauses = pauses_of(rank, size)
    layers = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 64))
    model = DistributedDataParallel(torch.compile(layers))
    optimizer = torch.optim.AdamW(layers.parameters())
    until_s, stop, step = time.monotonic() + minutes * 60, torch.zeros(1), 0
    while not stop[0]:
        if step:
            pauses.step()
        batch = 8 if step % 400 < 350 else 5  # another shape: compiled once more
        model(torch.randn(batch, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        stop[0] = rank == 0 and time.monotonic() >= until_s
        dist.broadcast(stop, 0)
        step += 1
    dist.barrier()
    dist.destroy_process_group()
    return step, pauses


@contextmanager
def _recorded_span(name: str) -> Iterator[None]:
    from echelon import recorder

    with recorder.span(name):
        yield


def main(kind: str, seed: str, minutes: float, scale: float, file: Path) -> None:
    """Run one rank to its end."""
    span = _recorded_span if kind == "marked" else None
    rank = 0

    def pauses_of(own_rank: int, size: int) -> Pauses:
        nonlocal rank
        rank = own_rank
        return Pauses(f"{kind} {seed}", rank, size, scale, span)

    train = train_torch if kind.startswith("torch") else train_numpy
    steps, pauses = train(pauses_of, minutes)
    if rank == 0:
        told: dict[str, Any] = {"steps": steps, "pauses": pauses.done}
        told["longest_s"] = round(pauses.longest_s, 1)
        file.write_text(json.dumps(told))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]), float(sys.argv[4]), Path(sys.argv[5]))
