"""Train a pipeline on after a rank is killed, with the same bits as without the loss.

echelon run --nproc-per-node 4 --on-loss shrink examples/resilient_pipeline.py
echelon run --nproc-per-node 4 --on-loss shrink examples/resilient_pipeline.py --kill 2
"""

import argparse
import os
import signal
from pathlib import Path

import torch
from torch import nn

import echelon.dist as dist
from echelon.dist import resilient
from echelon.dist.canonical import even_runs
from echelon.dist.mesh import DeviceMesh
from echelon.dist.pipeline import Pipeline, Stage, split
from echelon.train.same_bits import SameBitsPipeline, fingerprint

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--kill", type=int, default=-1, help="rank that dies in the middle of the run")
parser.add_argument("--hash-file", type=Path, help="where the first rank writes the hash")
options = parser.parse_args()

MICRO_BATCHES = 12
torch.set_num_threads(1)
rank = dist.init().rank


def make_layers() -> nn.Sequential:
    """Return the whole model, of which each rank keeps its own stage."""
    torch.manual_seed(0)
    hidden = [nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Dropout(0.1)) for _ in range(3)]
    return nn.Sequential(nn.Linear(32, 256), *hidden, nn.Linear(256, 1))


def batch(step: int, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the samples of a micro-batch, which depend only on the step and its number."""
    data = torch.Generator().manual_seed(1000 * step + number)
    x = torch.randn(64, 32, generator=data)
    return x, x.sin().sum(dim=1, keepdim=True)


def build(world: resilient.World) -> resilient.PipelineSetup[float]:
    """Build everything that depends on the remaining ranks; called again after each loss."""
    size = world.group.size
    depth = next(one for one in (3, 2, 1) if size % one == 0)  # stages; the rest are replicas
    mesh = DeviceMesh((depth, size // depth), ("pp", "dp"))
    pp, dp = mesh.group("pp"), mesh.group("dp")
    stage = Stage(split(make_layers(), depth)[pp.rank], index=pp.rank, num_stages=depth)
    run = even_runs(MICRO_BATCHES, dp.size)[dp.rank]
    pipe = Pipeline([stage], group=pp, replicas=dp, num_microbatches=len(run), loss_fn=nn.MSELoss())
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.steps)
    same = SameBitsPipeline(
        pipe, optimizer, micro_batches=MICRO_BATCHES, seed=1, probe=world.epoch == 0
    )

    def train_step(step: int) -> float:
        if rank == options.kill and step == options.steps // 2:
            print(f"rank {rank} kills itself in step {step}", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        loss = same.backward(step, lambda number: batch(step, number))
        same.clip_grad_norm_(1.0)
        optimizer.step()
        schedule.step()
        return loss

    if rank == 0:
        print(f"{size} ranks: {depth} stages, {dp.size} replicas", flush=True)
    return resilient.PipelineSetup(pipe, optimizer, train_step, also=[schedule])


def show(step: int, loss: float) -> None:
    """Print the loss of some steps; a step that is passed here is never undone."""
    if dist.world().rank == 0 and (step + 1) % 10 == 0:
        print(f"step {step + 1}  loss {loss:.4f}", flush=True)


setup = resilient.run_pipeline(build, total=options.steps, on_commit=show)
found = fingerprint(setup.pipe, setup.optimizer)
if dist.world().rank == 0:
    print(f"SHA-256 of weights and optimizer state: {found}", flush=True)
    if options.hash_file is not None:
        options.hash_file.parent.mkdir(parents=True, exist_ok=True)
        options.hash_file.write_text(found + "\n")
dist.shutdown()
