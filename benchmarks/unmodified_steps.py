"""What `benchmarks.unmodified overhead` times: steps of DDP or FSDP2, a program of its own."""

from __future__ import annotations

import json
import statistics
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

_WIDTH, _LAYERS, _ROWS, _WARMUP, _STEPS = 512, 6, 128, 10, 60


def main(kind: str) -> None:
    """Train for some steps; rank 0 prints what a step took."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    layers = [nn.Linear(_WIDTH, _WIDTH) for _ in range(_LAYERS)]
    model: nn.Module = nn.Sequential(*layers)
    if kind == "fsdp2":
        for layer in layers:
            fully_shard(layer)
        fully_shard(model)
    else:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x = torch.randn(_ROWS, _WIDTH)
    wall, losses = [], []
    for step in range(_WARMUP + _STEPS):
        if step == _WARMUP:
            cpu_s = time.process_time()
        began_s = time.perf_counter()
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        wall.append(time.perf_counter() - began_s)
        losses.append(loss.item())
    cpu_s = time.process_time() - cpu_s
    if dist.get_rank() == 0:
        measured = wall[_WARMUP:]
        told = {"best_ms": 1e3 * min(measured), "median_ms": 1e3 * statistics.median(measured)}
        print(json.dumps({**told, "cpu_ms": 1e3 * cpu_s / _STEPS, "losses": losses}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
