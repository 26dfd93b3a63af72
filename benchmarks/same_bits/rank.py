"""Run as one rank of `run.py`: time steps of both kinds in turn."""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import echelon.dist as dist
from benchmarks.sharding.model import Size, make_model
from echelon.dist.fsdp import clip_grad_norm_, fully_shard, gradient_sync
from echelon.train.same_bits import SameBits

SIZE = Size(depth=6, width=384, heads=6, context=256, batch=8)
_BUCKET = 1 << 22  # elements: as in SameBits

Step = Callable[[int], object]


def main() -> None:
    """Time steps; write {KIND: [[slowest rank's wall s, ranks' mean CPU s], ...]} as JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--layout", choices=("replicated", "sharded"))
    parser.add_argument("--per-rank", type=int, help="micro-batches of each rank")
    parser.add_argument("--tokens", type=int, help="per micro-batch")
    parser.add_argument("--turns", type=int)
    parser.add_argument("--order", type=int, help="seed of the order")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    group = dist.init("shm")
    steps = {
        "rank-ordered": _rank_ordered(options, group),
        "canonical": _canonical(options, group),
    }
    samples: dict[str, list[list[float]]] = {kind: [] for kind in steps}
    order = random.Random(options.order)
    for turn in range(options.turns + 1):
        for kind in order.sample(sorted(steps), len(steps)):
            taken = _timed(group, steps[kind], turn)
            if turn:  # the first one warms up, and probes
                samples[kind].append(taken)
    if group.rank == 0:
        options.out.write_text(json.dumps(samples))
    dist.shutdown()


def _timed(group: dist.ProcessGroup, step: Step, turn: int) -> list[float]:
    group.barrier()
    wall, used = time.perf_counter(), time.process_time()
    step(turn)
    spent = torch.tensor([time.perf_counter() - wall], dtype=torch.float64)
    cpu = torch.tensor([time.process_time() - used], dtype=torch.float64)
    group.all_reduce(spent, "max")
    group.all_reduce(cpu, "avg")
    return [spent.item(), cpu.item()]


def _model(options: argparse.Namespace) -> nn.Module:
    torch.manual_seed(1)
    model: Any = make_model(SIZE)
    if options.layout == "sharded":
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
    found: nn.Module = model
    return found


def _loss(model: nn.Module, tokens: int, step: int, number: int) -> torch.Tensor:
    data = torch.Generator().manual_seed(1000 * step + number)
    rows = max(1, tokens // SIZE.context)
    ids = torch.randint(0, SIZE.vocabulary, (rows, tokens // rows + 1), generator=data)
    output = model(ids[:, :-1]).flatten(0, 1)
    return nn.functional.cross_entropy(output, ids[:, 1:].flatten())


def _canonical(options: argparse.Namespace, group: dist.ProcessGroup) -> Step:
    model = _model(options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    same = SameBits(model, optimizer, micro_batches=options.per_rank * group.size)

    def step(at: int) -> None:
        same.backward(at, lambda number: _loss(model, options.tokens, at, number))
        same.clip_grad_norm_(1.0)
        optimizer.step()

    return step


def _rank_ordered(options: argparse.Namespace, group: dist.ProcessGroup) -> Step:
    """Return a step of the same training in its usual form, with sums in rank order."""
    model = _model(options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    numbers = range(group.rank * options.per_rank, (group.rank + 1) * options.per_rank)

    def step(at: int) -> None:
        optimizer.zero_grad()
        for number in numbers:
            with gradient_sync(model, enabled=number == numbers[-1]):
                loss = _loss(model, options.tokens, at, number) / options.per_rank
                loss.backward()
        if options.layout == "replicated":
            _average(list(model.parameters()), group)
        mean = loss.detach()
        group.all_reduce(mean, "avg")
        clip_grad_norm_(model, 1.0)
        optimizer.step()

    return step


def _average(parameters: list[nn.Parameter], group: dist.ProcessGroup) -> None:
    buckets: list[list[torch.Tensor]] = [[]]
    for parameter in parameters:
        if parameter.grad is None:
            continue
        if sum(one.numel() for one in buckets[-1]) + parameter.numel() > _BUCKET:
            buckets.append([])
        buckets[-1].append(parameter.grad)
    for bucket in buckets:
        flat = torch.cat([one.reshape(-1) for one in bucket])
        group.all_reduce(flat, "avg")
        parts = torch.split(flat, [one.numel() for one in bucket])
        for one, part in zip(bucket, parts, strict=True):
            one.copy_(part.view_as(one))


if __name__ == "__main__":
    main()
