"""Train on after a rank is killed, with the same bits as without the loss.

echelon run --nproc-per-node 4 --on-loss shrink examples/resilient.py
echelon run --nproc-per-node 4 --on-loss shrink examples/resilient.py --kill 2
"""

import argparse
import os
import signal
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import echelon.dist as dist
from echelon.dist import resilient
from echelon.train.same_bits import SameBits, fingerprint

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--kill", type=int, default=-1, help="rank that dies in the middle of the run")
parser.add_argument("--hash-file", type=Path, help="where the first rank writes the hash")
options = parser.parse_args()

torch.set_num_threads(1)
group = dist.init()
rank = group.rank
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 512), nn.GELU(), nn.Dropout(0.1), nn.Linear(512, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.steps)


def loss_of(step: int, number: int) -> torch.Tensor:
    """Return the loss of a micro-batch, whose samples depend only on the step and its number."""
    data = torch.Generator().manual_seed(1000 * step + number)
    x = torch.randn(64, 32, generator=data)
    if rank == options.kill and step == options.steps // 2:
        print(f"rank {rank} kills itself in step {step}", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    error: torch.Tensor = model(x) - x.sin().sum(dim=1, keepdim=True)
    return error.square().mean()


def prepare(world: resilient.World) -> Callable[[int], float]:
    """Build everything that depends on the remaining ranks; called again after each loss."""
    same = SameBits(model, optimizer, micro_batches=12, seed=1, probe=world.epoch == 0)

    def train_step(step: int) -> float:
        loss = same.backward(step, lambda number: loss_of(step, number))
        same.clip_grad_norm_(1.0)
        optimizer.step()
        schedule.step()
        return loss

    return train_step


def show(step: int, loss: float) -> None:
    """Print the loss of some steps; a step that is passed here is never undone."""
    if dist.world().rank == 0 and (step + 1) % 10 == 0:
        print(f"step {step + 1}  loss {loss:.4f}  ranks {dist.world().size}", flush=True)


resilient.run(prepare, model, optimizer, total=options.steps, also=[schedule], on_commit=show)
found = fingerprint(model, optimizer)
if dist.world().rank == 0:
    print(f"SHA-256 of weights and optimizer state: {found}", flush=True)
    if options.hash_file is not None:
        options.hash_file.parent.mkdir(parents=True, exist_ok=True)
        options.hash_file.write_text(found + "\n")
dist.shutdown()
