"""Train the same weights, bit for bit, on any number of ranks, replicated or sharded.

echelon run --nproc-per-node 2 examples/same_bits.py
echelon run --nproc-per-node 3 examples/same_bits.py --shard
"""

import argparse
from pathlib import Path

import torch
from torch import nn

import echelon.dist as dist
from echelon.dist.fsdp import fully_shard
from echelon.train.same_bits import SameBits, fingerprint

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--shard", action="store_true", help="divide weights and optimizer state")
parser.add_argument("--hash-file", type=Path, help="where the first rank writes the hash")
options = parser.parse_args()

torch.set_num_threads(1)  # kernels may depend on the number of threads
group = dist.init()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 512), nn.GELU(), nn.Dropout(0.1), nn.Linear(512, 1))
if options.shard:
    fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
same = SameBits(model, optimizer, micro_batches=10, seed=1)  # 10: whatever the number of ranks


def loss_of(step: int, number: int) -> torch.Tensor:
    """Return the loss of a micro-batch, whose samples depend only on the step and its number."""
    data = torch.Generator().manual_seed(1000 * step + number)
    x = torch.randn(64, 32, generator=data)
    error: torch.Tensor = model(x) - x.sin().sum(dim=1, keepdim=True)
    return error.square().mean()


for step in range(options.steps):
    loss = same.backward(step, lambda number, step=step: loss_of(step, number))
    same.clip_grad_norm_(1.0)
    optimizer.step()
    if group.rank == 0 and (step + 1) % 10 == 0:
        print(f"step {step + 1}  loss {loss:.4f}  micro-batches here {len(same.run)}", flush=True)

found = fingerprint(model, optimizer)
if group.rank == 0:
    print(f"SHA-256 of weights and optimizer state: {found}", flush=True)
    if options.hash_file is not None:
        options.hash_file.parent.mkdir(parents=True, exist_ok=True)
        options.hash_file.write_text(found + "\n")
dist.shutdown()
