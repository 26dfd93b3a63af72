"""FSDP2 (`fully_shard`) over Gloo."""

import faults
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler

dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(faults.FEATURES, 32), nn.Linear(32, 32), nn.Linear(32, 1))
mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
for layer in model:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
rows = faults.Rows()
loader = DataLoader(
    rows, faults.BATCH, sampler=DistributedSampler(rows), num_workers=faults.workers
)
for step, (x, y) in enumerate(faults.batches(loader)):
    if faults.has_had_enough(step):
        break
    loss = nn.functional.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    faults.work(step)
    if step == faults.arguments.step:
        shards = {name: one.to_local() for name, one in model.state_dict().items()}
        torch.save(shards, faults.checkpoint_path())
if dist.get_rank() == 0:
    print(f"loss {loss.item():.6f}")
dist.destroy_process_group()
