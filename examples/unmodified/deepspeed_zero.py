"""DeepSpeed, ZeRO stage 2, over Gloo."""

import deepspeed
import faults
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

deepspeed.init_distributed(dist_backend="gloo", verbose=False)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(faults.FEATURES, 32), nn.Linear(32, 1))
config = {
    "train_micro_batch_size_per_gpu": faults.BATCH,
    "zero_optimization": {"stage": 2},
    "zero_allow_untested_optimizer": True,
    "wall_clock_breakdown": False,
}
engine, optimizer, _, _ = deepspeed.initialize(
    model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3), config=config
)
rows = faults.Rows()
loader = DataLoader(
    rows, faults.BATCH, sampler=DistributedSampler(rows), num_workers=faults.workers
)
for step, (x, y) in enumerate(faults.batches(loader)):
    if faults.has_had_enough(step):
        break
    loss = nn.functional.mse_loss(engine(x), y)
    engine.backward(loss)
    engine.step()
    faults.work(step)
    if step == faults.arguments.step:
        torch.save(engine.module.state_dict(), faults.checkpoint_path())
if dist.get_rank() == 0:
    print(f"loss {loss.item():.6f}")
dist.destroy_process_group()
