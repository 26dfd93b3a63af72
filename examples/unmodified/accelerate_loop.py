"""A training loop with Hugging Face Accelerate."""

import faults
import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader

accelerator = Accelerator(cpu=True)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(faults.FEATURES, 32), nn.Linear(32, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = DataLoader(faults.Rows(), faults.BATCH, num_workers=faults.workers)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for step, (x, y) in enumerate(faults.batches(loader)):
    if faults.has_had_enough(step):
        break
    loss = nn.functional.mse_loss(model(x), y)
    optimizer.zero_grad()
    accelerator.backward(loss)
    optimizer.step()
    faults.work(step)
    if step == faults.arguments.step:
        torch.save(accelerator.get_state_dict(model), faults.checkpoint_path())
losses = accelerator.gather(loss.detach())
accelerator.print(f"loss {losses.mean().item():.6f}")
accelerator.end_training()
