"""`Trainer.train` of Hugging Face Transformers."""

import faults
import torch
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments


class Model(nn.Module):
    """A small regression model whose forward returns the loss, as Trainer expects."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(faults.FEATURES, 32), nn.Linear(32, 1))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the loss of a batch."""
        return {"loss": nn.functional.mse_loss(self.net(x), labels)}


class Works(TrainerCallback):
    """A user's callback that works between steps."""

    def on_step_end(self, args: object, state: object, control: object, **_: object) -> object:
        """Run between steps, like a user's callback."""
        step = state.global_step - 1
        faults.work(step)
        if step == faults.arguments.step:
            torch.save(model.state_dict(), faults.checkpoint_path())
            if faults.is_due("leave", "uneven"):
                control.should_training_stop = True
        return control


def collate(rows: list[tuple[torch.Tensor, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Return a batch as a dict of the model's arguments."""
    xs, ys = zip(*rows, strict=True)
    return {"x": torch.stack(xs), "labels": torch.stack(ys)}


torch.manual_seed(0)
model = Model()
arguments = TrainingArguments(
    output_dir=faults.arguments.folder, use_cpu=True, num_train_epochs=1, learning_rate=1e-3,
    per_device_train_batch_size=faults.BATCH, dataloader_num_workers=faults.workers,
    save_strategy="no", report_to=[], disable_tqdm=True, logging_strategy="no",
)  # fmt: skip
trainer = Trainer(
    model=model, args=arguments, train_dataset=faults.Rows(), data_collator=collate,
    callbacks=[Works()],
)  # fmt: skip
result = trainer.train()
if trainer.is_world_process_zero():
    print(f"loss {result.training_loss:.6f}")
