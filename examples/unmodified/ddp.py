"""DistributedDataParallel over Gloo, in the style of torch's tutorials."""

import faults
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(faults.FEATURES, 32), nn.Linear(32, 1)))
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
    optimizer.step()
    faults.work(step)
    if step == faults.arguments.step:
        torch.save(model.state_dict(), faults.checkpoint_path())
if dist.get_rank() == 0:
    print(f"loss {loss.item():.6f}")
dist.destroy_process_group()
