"""Run as one rank of `run.py`: time steps with and without copies, in random order."""

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
from echelon.dist.fsdp import fully_shard
from echelon.dist.resilient.sharded import ShardedState
from echelon.train.same_bits import SameBits

KINDS = ("plain", "before", "meanwhile")  # when the start of the step is copied
SIZES = {
    "10.7M": Size(depth=6, width=384, heads=6, context=256, batch=8),
    "85M": Size(depth=12, width=768, heads=12, context=256, batch=8),
}


def main() -> None:
    """Time steps; write {KIND: [[slowest rank's wall s, ranks' mean CPU s], ...]} as JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=tuple(SIZES))
    parser.add_argument("--tokens", type=int, help="per rank and step")
    parser.add_argument("--turns", type=int)
    parser.add_argument("--order", type=int, help="seed of the order")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    group = dist.init("shm")
    torch.manual_seed(1)
    model: Any = make_model(SIZES[options.model])
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    state = ShardedState(model, optimizer)
    state.enter(group, 0)
    train = _training(options, group, model, optimizer)
    samples: dict[str, Any] = {kind: [] for kind in KINDS}
    order, at = random.Random(options.order), 0
    for turn in range(options.turns + 2):
        for kind in order.sample(KINDS, len(KINDS)):
            taken = _timed(group, train, at, state, kind)
            at += 1
            if turn > 1:  # by then both copies have their memory
                samples[kind].append(taken)
    if group.rank == 0:
        options.out.write_text(json.dumps({**samples, "bytes": state.num_bytes}))
    state.drop()
    dist.shutdown()


def _timed(
    group: dist.ProcessGroup,
    train: Callable[[int], None],
    at: int,
    state: ShardedState,
    kind: str,
) -> list[float]:
    group.barrier()
    wall, used = time.perf_counter(), time.process_time()
    if kind != "plain":
        state.keep(at, overlaps=kind == "meanwhile")
    train(at)
    state.finish()
    group.barrier()
    spent = torch.tensor([time.perf_counter() - wall], dtype=torch.float64)
    cpu = torch.tensor([time.process_time() - used], dtype=torch.float64)
    group.all_reduce(spent, "max")
    group.all_reduce(cpu, "avg")
    return [spent.item(), cpu.item()]


def _training(
    options: argparse.Namespace,
    group: dist.ProcessGroup,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
) -> Callable[[int], None]:
    same = SameBits(model, optimizer, micro_batches=group.size)
    size = SIZES[options.model]

    def train(at: int) -> None:
        same.backward(at, lambda number: _loss(model, size, options.tokens, at, number))
        same.clip_grad_norm_(1.0)
        optimizer.step()

    return train


def _loss(model: nn.Module, size: Size, tokens: int, step: int, number: int) -> torch.Tensor:
    data = torch.Generator().manual_seed(1000 * step + number)
    rows = max(1, tokens // size.context)
    ids = torch.randint(0, size.vocabulary, (rows, tokens // rows + 1), generator=data)
    output = model(ids[:, :-1]).flatten(0, 1)
    return nn.functional.cross_entropy(output, ids[:, 1:].flatten())


if __name__ == "__main__":
    main()
