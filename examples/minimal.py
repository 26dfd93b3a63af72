"""Implement data parallelism by hand: ranks have different batches and average their gradients.

echelon run --nproc-per-node 2 examples/minimal.py
echelon run --nproc-per-node 2 --stall-timeout 5 --on-stall stop examples/minimal.py --hang 1
"""

import argparse
import threading

import torch

import echelon.dist as dist
from echelon import recorder

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=50)
parser.add_argument("--hang", type=int, default=-1, help="rank that stops in the middle")
options = parser.parse_args()

torch.set_num_threads(1)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
world = dist.init()
for parameter in model.parameters():
    world.broadcast(parameter.data, root=0)  # all ranks start from the same weights
data = torch.Generator().manual_seed(world.rank)

for step in range(options.steps):
    recorder.step(step)
    if world.rank == options.hang and step == options.steps // 2:
        threading.Event().wait()  # never set: the verdict names this rank and this line
    x = torch.randn(32, 8, generator=data)
    loss = (model(x) - x.sum(dim=1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    for parameter in model.parameters():
        world.all_reduce(parameter.grad, op="avg")
    optimizer.step()
if world.rank == 0:
    print(f"step {options.steps}  loss {loss.item():.5f}")
dist.shutdown()
