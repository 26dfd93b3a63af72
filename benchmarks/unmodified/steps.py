"""Measure the cost of recording: steps of DDP or FSDP2 with and without it, in a separate program.

    python -m benchmarks.unmodified.run overhead    # alternating processes; compares losses too
    echelon run --nproc-per-node 2 benchmarks/unmodified/steps.py ddp --turns 30 [--width 512]

With `--turns`, recording is switched on and off in turn within one job, on all ranks at the same
step, so that both variants run under the same conditions. A turn consists of several steps with
recording, and as many without.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

_WARMUP, _STEPS = 10, 60


class _Training:
    """A model and its training steps."""

    def __init__(self, options: argparse.Namespace) -> None:
        torch.manual_seed(0)
        layers = [nn.Linear(options.width, options.width) for _ in range(options.layers)]
        self.model: nn.Module = nn.Sequential(*layers)
        if options.kind == "fsdp2":
            for layer in layers:
                fully_shard(layer)
            fully_shard(self.model)
        else:
            self.model = DistributedDataParallel(self.model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self.x = torch.randn(options.rows, options.width)

    def step(self) -> float:
        """Take one training step; return its loss."""
        self.optimizer.zero_grad()
        loss = self.model(self.x).square().mean()
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def timed(self, steps: int) -> tuple[list[float], float]:
        """Take some steps; return the seconds of each, and their mean CPU time."""
        seconds, cpu_s = [], time.process_time()
        for _ in range(steps):
            began_s = time.perf_counter()
            self.step()
            seconds.append(time.perf_counter() - began_s)
        return seconds, (time.process_time() - cpu_s) / steps


class _Record:
    """This process's recording, which can be removed and restored."""

    def __init__(self, wait: Any) -> None:
        import echelon.recorder.current as black_box
        from echelon.recorder.torch import start

        assert start._operations is not None, "run it under `echelon run`"
        self._black_box: Any = black_box
        self._recorder = black_box.if_opened()
        self._operations: Any = start._operations
        self._operations.pending.start = lambda: None  # its thread runs already
        self._wait = wait
        self._is_on = True

    def switch(self, is_on: bool) -> None:
        """Restore or remove recording, unless it is in that state already."""
        if is_on != self._is_on:
            self._is_on = is_on
            self._put_back() if is_on else self._take_out()

    def num_records(self) -> int:
        """Return the number of operations and spans recorded so far."""
        return int(self._recorder.num_records())

    def _take_out(self) -> None:
        """Restore torch to its unrecorded state. Call this between steps."""
        works = self._operations.pending.works
        for number in list(works):
            works.pop(number, None)
            self._recorder.completed(number)
        for library in self._operations._libraries:
            library._destroy()
        self._operations._libraries.clear()
        torch._C._distributed_c10d.Work.wait = self._wait
        self._black_box._recorder = None

    def _put_back(self) -> None:
        """Resume recording."""
        self._black_box._recorder = self._recorder
        self._operations.install()


def _in_turns(training: _Training, record: _Record, turns: int, steps: int) -> dict[str, Any]:
    """Measure pairs of turns; return rank 0's measurements, in milliseconds and as ratios."""
    found: dict[bool, dict[str, list[float]]] = {
        is_on: {"best": [], "median": [], "cpu": []} for is_on in (True, False)
    }
    for turn in range(2 * turns + 2):
        is_on = turn % 4 in (1, 2)  # off, on, on, off: a drift affects both alike
        record.switch(is_on)
        training.timed(1)
        seconds, cpu_s = training.timed(steps)
        if turn >= 2:
            found[is_on]["best"].append(1e3 * min(seconds))
            found[is_on]["median"].append(1e3 * statistics.median(seconds))
            found[is_on]["cpu"].append(1e3 * cpu_s)
    record.switch(True)
    before = record.num_records()
    training.step()
    told: dict[str, Any] = {"records": record.num_records() - before}
    for name in ("best", "median", "cpu"):
        on, off = found[True][name], found[False][name]
        ratios = sorted(a / b for a, b in zip(on, off, strict=True))
        told[f"{name}_ms"] = [round(statistics.median(off), 3), round(statistics.median(on), 3)]
        told[f"{name}_ratio"] = [round(q, 4) for q in statistics.quantiles(ratios, n=4)]
        told[f"{name}_least_ms"] = [round(min(off), 3), round(min(on), 3)]
    return told


def main(options: argparse.Namespace) -> None:
    """Train for several steps; print the step time on rank 0."""
    torch.set_num_threads(1)
    wait = torch._C._distributed_c10d.Work.wait
    dist.init_process_group("gloo")
    training = _Training(options)
    told: dict[str, Any]
    if options.turns:
        training.timed(_WARMUP)
        told = _in_turns(training, _Record(wait), options.turns, options.steps)
    else:
        losses = [training.step() for _ in range(_WARMUP)]
        wall, cpu_s = [], time.process_time()
        for _ in range(_STEPS):
            began_s = time.perf_counter()
            losses.append(training.step())
            wall.append(time.perf_counter() - began_s)
        cpu_s = time.process_time() - cpu_s
        told = {"best_ms": 1e3 * min(wall), "median_ms": 1e3 * statistics.median(wall)}
        told |= {"cpu_ms": 1e3 * cpu_s / _STEPS, "losses": losses}
    if dist.get_rank() == 0:
        print(json.dumps(told))
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("kind", choices=("ddp", "fsdp2"))
    parser.add_argument("--turns", type=int, default=0)
    parser.add_argument("--steps", type=int, default=20, help="of a turn")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--rows", type=int, default=128)
    main(parser.parse_args())
