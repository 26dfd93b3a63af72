"""Train the same model as `train_gpt.py`, and break it on purpose on one rank.

    echelon run --nproc-per-node 4 --stall-timeout 5 --on-stall stop \
        examples/break_it.py --fault slow-data --rank 2

Within a minute, the launcher prints a verdict: which rank, why, and at which line. Each fault is a
short class that overrides one method of the training loop (`gpt/training/loop.py`). The faulty call
is on a line of its own, so that the verdict can name it. Without --fault, the run succeeds.
"""

from __future__ import annotations

import argparse
import os
import queue
import signal
import threading

import torch
from gpt.arguments import OneLineParser, whole_number
from gpt.model.transformer import GPTConfig
from gpt.output.progress import Scale
from gpt.output.report import Report
from gpt.text.corpus import load_corpus
from gpt.text.data import Batch
from gpt.training.loop import Trainer, TrainingSettings
from gpt.training.machine import limit_threads, load_optimizers
from torch import Tensor

import echelon.dist as dist

TINY = GPTConfig(layers=2, width=64, heads=2, context=64)
BATCH = 16  # number of sequences over all ranks
BUCKET_BYTES = 128 * 1024  # gives five buckets, with neighbors of different sizes
TEXT_BYTES = 2 << 20  # enough to break things


class FaultyTrainer(Trainer):
    """A trainer that does one thing wrong, once, at step `at_step`."""

    at_step = 0

    def is_due(self) -> bool:
        """Return whether the fault occurs in this step."""
        return self.step == self.at_step


class Kill(FaultyTrainer):
    """A trainer that dies between forward and backward, as if the kernel had killed it."""

    def compute_loss(self, batch: Batch) -> Tensor:
        """Compute the loss, or die at the chosen step."""
        loss = super().compute_loss(batch)
        if self.is_due():
            os.kill(os.getpid(), signal.SIGKILL)
        return loss


class Raise(FaultyTrainer):
    """A trainer that raises an uncaught exception for a corrupt batch."""

    def compute_loss(self, batch: Batch) -> Tensor:
        """Compute the loss after checking the targets."""
        if self.is_due():
            # a reader that took the wrong byte of each pair
            batch = batch._replace(targets=batch.targets + 256)
        self.check(batch.targets)
        return super().compute_loss(batch)

    def check(self, targets: Tensor) -> None:
        """Raise an exception if a target is not a byte."""
        largest = int(targets.max())
        if largest > 255:
            raise ValueError(f"step {self.step}: target {largest} is outside the vocabulary of 256")


class Hang(FaultyTrainer):
    """A trainer that waits in ordinary code for something that never happens."""

    def compute_loss(self, batch: Batch) -> Tensor:
        """Compute the loss once the tokenizer is ready."""
        if self.is_due():
            wait_for_tokenizer()
        return super().compute_loss(batch)


def wait_for_tokenizer() -> None:
    """Wait for a lock that its owner forgot to release."""
    tokenizer_is_busy = threading.Lock()
    tokenizer_is_busy.acquire()
    tokenizer_is_busy.acquire()


class StarveOfData(FaultyTrainer):
    """A trainer that waits for a stuck loader thread, inside the loop's `data_wait` span."""

    def fetch_batch(self) -> Batch:
        """Get the batch from the source, or from a loader that never delivers."""
        if self.is_due():
            return self.next_from_loader()
        return super().fetch_batch()

    def next_from_loader(self) -> Batch:
        """Start a loader thread and take its first batch."""
        batches: queue.Queue[Batch] = queue.Queue()
        mount_is_back = threading.Event()  # never set: imagine a network file system that hangs
        loader = threading.Thread(target=mount_is_back.wait, name="loader", daemon=True)
        loader.start()
        return batches.get()


class SkipBucket(FaultyTrainer):
    """A trainer that skips one all_reduce, as if this rank had nothing to contribute."""

    def average_bucket(self, flat: Tensor) -> None:
        """Average the bucket, unless it "had no gradient" on this rank."""
        if self.is_due() and flat is self.buckets.flats[-1]:
            return
        super().average_bucket(flat)


class WrongShape(FaultyTrainer):
    """A trainer that averages a bucket without its last element, as after an off-by-one error."""

    def average_bucket(self, flat: Tensor) -> None:
        """Average the bucket, or all but its last element."""
        if self.is_due():
            self.world.all_reduce(flat[:-1], op="avg")
        else:
            super().average_bucket(flat)


class WrongType(FaultyTrainer):
    """A trainer that averages a bucket in float64 while the others use float32."""

    def average_bucket(self, flat: Tensor) -> None:
        """Average the bucket, or a copy in float64."""
        if self.is_due():
            self.world.all_reduce(flat.to(torch.float64), op="avg")
        else:
            super().average_bucket(flat)


class WrongOperation(FaultyTrainer):
    """A trainer that calls a different collective from the others."""

    def average_bucket(self, flat: Tensor) -> None:
        """Average the bucket, or broadcast rank 0's."""
        if self.is_due():
            self.world.broadcast(flat, root=0)
        else:
            super().average_bucket(flat)


FAULTS: dict[str, type[FaultyTrainer]] = {
    "kill": Kill,
    "exception": Raise,
    "hang": Hang,
    "slow-data": StarveOfData,
    "skip": SkipBucket,
    "shape": WrongShape,
    "dtype": WrongType,
    "op": WrongOperation,
}


def build_parser() -> argparse.ArgumentParser:
    """Return the argument parser."""
    parser = OneLineParser(
        description=__doc__.partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--fault", choices=("none", *FAULTS), default="none")
    parser.add_argument("--rank", type=whole_number(0), default=1, help="the rank that fails")
    parser.add_argument("--at-step", type=whole_number(0), default=10, help="steps before it")
    parser.add_argument("--steps", type=whole_number(1), default=200)
    return parser


def build_trainer(options: argparse.Namespace, settings: TrainingSettings) -> Trainer:
    """Join the other ranks, and create this rank's trainer, with the fault on the chosen rank.

    Raises:
        ValueError: the rank does not exist, or the step is never reached.
    """
    world = dist.init()
    breaks = options.fault != "none"
    if breaks and options.rank >= world.size:
        raise ValueError(f"--rank {options.rank}: there are {world.size} ranks, from 0")
    if breaks and options.at_step >= options.steps:
        raise ValueError(f"--at-step {options.at_step}: training ends after {options.steps} steps")
    trainer_class = FAULTS[options.fault] if breaks and world.rank == options.rank else Trainer
    corpus = load_corpus(limit_bytes=TEXT_BYTES)
    trainer = trainer_class.build(TINY, settings, corpus, world=world)
    if isinstance(trainer, FaultyTrainer):
        trainer.at_step = options.at_step
    return trainer


def build_report(trainer: Trainer) -> Report:
    """Create the report, which rank 0 prints."""
    settings = trainer.settings
    scale = Scale(
        num_steps=settings.steps,
        tokens_per_step=settings.batch * TINY.context,
        flops_per_token=trainer.model.flops_per_token(),
    )
    return Report(scale, world=trainer.world)


def main() -> None:
    """Train to the end, or until the fault ends the job."""
    parser = build_parser()
    options = parser.parse_args()
    settings = TrainingSettings(
        steps=options.steps,
        batch=BATCH,
        lr=3e-3,
        warmup=10,
        clip=1.0,
        seed=0,
        bucket_bytes=BUCKET_BYTES,
    )
    limit_threads()
    load_optimizers()
    try:
        trainer = build_trainer(options, settings)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    report = build_report(trainer)
    while trainer.step < options.steps:
        loss = trainer.train_step()
        report.step(trainer, loss)
    dist.shutdown()


if __name__ == "__main__":
    main()
