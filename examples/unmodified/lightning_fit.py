"""`Trainer.fit` of Lightning, with DDP."""

import os
import warnings

import faults
import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader

warnings.simplefilter("ignore")


class Model(lightning.LightningModule):
    """A small regression model."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(faults.FEATURES, 32), nn.Linear(32, 1))

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor | None:
        """Return the loss of a batch."""
        x, y = batch
        loss = nn.functional.mse_loss(self.net(x), y)
        self.log("loss", loss.detach(), sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

    def on_train_batch_end(self, outputs: object, batch: object, index: int) -> None:
        """Run between steps, like a user's hook."""
        faults.work(index)
        if index == faults.arguments.step:
            torch.save(self.state_dict(), faults.checkpoint_path())

    def on_train_batch_start(self, batch: object, index: int) -> int | None:
        """Leave the epoch early on one rank."""
        leaves = faults.has_had_enough(index) or index == faults.arguments.step
        return -1 if leaves and faults.is_due("leave", "uneven") else None


lightning.seed_everything(0, verbose=False)
trainer = lightning.Trainer(
    accelerator="cpu", devices=int(os.environ["LOCAL_WORLD_SIZE"]), strategy="ddp", max_epochs=1,
    logger=False, enable_checkpointing=False, enable_progress_bar=False,
    enable_model_summary=False, default_root_dir=faults.arguments.folder,
)  # fmt: skip
trainer.fit(Model(), DataLoader(faults.Rows(), faults.BATCH, num_workers=faults.workers))
if trainer.global_rank == 0:
    print(f"loss {trainer.callback_metrics['loss'].item():.6f}")
