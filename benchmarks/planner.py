"""Compare the estimates of `echelon plan` with measurements: memory and step time.

    echelon run --nproc-per-node 4 -m echelon.planner.measure --out /tmp/links.json
    python -m benchmarks.planner --links /tmp/links.json

Each layout is a separate job on ranks of this machine, with a Llama-shaped model in fp32 and AdamW,
through `parallelize`. Memory is the peak resident size of the largest rank, less the rank's size
before the model was created. Time is the median step of the slowest rank.
"""

# ruff: noqa: D103 -- main() reads top-down
from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from echelon.planner.layout import Job, Layout
from echelon.planner.machine import assumed, read_machine
from echelon.planner.memory import memory
from echelon.planner.model import Model
from echelon.planner.step_time import step_time

_MIB = 1 << 20
SIZES = {
    "layers": 8, "width": 384, "heads": 8, "kv_heads": 8, "hidden": 1024, "vocabulary": 2048,
    "context": 256,
}  # fmt: skip
LAYOUTS = {
    "shard 4": Layout(shard=4),
    "replicate 4": Layout(replicate=4),
    "replicate 2 x shard 2": Layout(replicate=2, shard=2),
    "tp 4": Layout(tp=4),
    "pp 4, 1f1b": Layout(pp=4, schedule="1f1b", microbatches=8),
    "pp 2 x shard 2, 1f1b": Layout(pp=2, shard=2, schedule="1f1b", microbatches=4),
    "shard 2 x tp 2": Layout(shard=2, tp=2),
    "shard 4, 2 micro-batches": Layout(shard=4, microbatches=2),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--links", type=Path, help="what echelon.planner.measure wrote")
    parser.add_argument("--layouts", default=";".join(LAYOUTS), help="separated by semicolons")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.serve, args.steps, args.batch, args.out)
        return
    model = Model(**SIZES, is_gated=True, learns_positions=False)
    job = Job(ranks=4, ranks_per_node=4, batch=args.batch, context=SIZES["context"], on_host=True)
    machine = assumed(is_half=False)
    if args.links:
        machine = read_machine(args.links, machine)
    print("| layout | MiB planned | measured | ratio | s planned | measured | ratio |")
    print("|---|---|---|---|---|---|---|")
    for name in args.layouts.split(";"):
        layout = LAYOUTS[name]
        planned = memory(model, layout, job).total / _MIB
        planned_s = step_time(model, layout, job, machine).total
        taken, took_s = run(name, args.steps, args.batch)
        print(
            f"| {name} | {planned:.0f} | {taken:.0f} | {planned / taken:.2f} | "
            f"{planned_s:.2f} | {took_s:.2f} | {planned_s / took_s:.2f} |",
            flush=True,
        )


def run(name: str, steps: int, batch: int) -> tuple[float, float]:
    """Train in a separate job; return the largest rank's memory in MiB and the seconds per step."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            "echelon", "run", "--nproc-per-node", "4", "--log-dir", folder, __file__, "--serve",
            name, "--steps", str(steps), "--batch", str(batch), "--out", f"{folder}/out",
        ]  # fmt: skip
        done = subprocess.run(
            [str(Path(sys.executable).parent / command[0]), *command[1:]],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode:
            raise SystemExit(f"{name}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
        found = json.loads(Path(f"{folder}/out").read_text())
    return found["mib"], found["step_s"]


def serve(name: str, steps: int, batch: int, out: Path) -> None:
    """Run as one rank of a layout."""
    import torch
    import torch.nn.functional as F  # noqa: N812 -- the name the field uses

    import echelon.dist as dist
    from echelon.dist.mesh import DeviceMesh
    from echelon.dist.parallel import parallelize
    from echelon.train.models import Transformer, llama

    torch.set_num_threads(1)
    layout = LAYOUTS[name]
    world = dist.init()
    torch._dynamo  # noqa: B018 -- what the optimizer loads is not the model's
    mesh = DeviceMesh(
        (layout.pp, layout.replicate, layout.shard, layout.tp), ("pp", "replicate", "shard", "tp")
    )
    Transformer(llama(**TINY)).forward(torch.zeros(1, 8, dtype=torch.int64)).sum().backward()
    before = resident_mib()
    torch.manual_seed(0)
    model = Transformer(llama(**SIZES))

    def loss_fn(logits: Any, targets: Any) -> Any:
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    parallel = parallelize(
        model, mesh, loss_fn=loss_fn, num_microbatches=layout.microbatches,
        schedule=layout.schedule or "1f1b",
    )  # fmt: skip
    del model
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-4)
    rank, size = parallel.data
    generator = torch.Generator().manual_seed(rank)
    shape = (batch // size, SIZES["context"])
    seconds = []
    for _ in range(steps):
        tokens = torch.randint(0, SIZES["vocabulary"], shape, generator=generator)
        world.barrier()
        began_s = time.perf_counter()
        optimizer.zero_grad()
        parallel.step(tokens, tokens)
        optimizer.step()
        world.barrier()
        seconds.append(time.perf_counter() - began_s)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    figures = torch.tensor([peak - before, statistics.median(seconds[1:])], dtype=torch.float64)
    world.all_reduce(figures, op="max")
    if world.rank == 0:
        out.write_text(json.dumps({"mib": figures[0].item(), "step_s": figures[1].item()}))
    dist.shutdown()


TINY = {
    "layers": 1, "width": 32, "heads": 2, "kv_heads": 2, "hidden": 64, "vocabulary": 64,
    "context": 16,
}  # fmt: skip


def resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / _MIB


if __name__ == "__main__":
    main()
