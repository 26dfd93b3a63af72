"""Train a small GPT on real text, data-parallel over every rank that the launcher started.

    echelon run --nproc-per-node 2 examples/train_gpt.py
    echelon run --nproc-per-node 2 examples/train_gpt.py --steps 300 --data my_book.txt
    python examples/train_gpt.py --checkpoint gpt.pt --checkpoint-every 100
    python examples/train_gpt.py --checkpoint gpt.pt --resume gpt.pt

By default it reads the source text of the Python that runs it: on every machine, tens of megabytes,
nothing to download. It ends with the validation loss, the loss of a bigram model of the same split
(which a model that does not attend cannot beat), and a sample of what it has learnt to write.

The parts are in `gpt/`, one noun a file; start with `gpt/loop.py`.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpt.arguments import OneLineParser, positive_number, whole_number
from gpt.bigram import bigram_loss
from gpt.checkpoint import CheckpointError, load_checkpoint, save_checkpoint
from gpt.data import Dataset, load_dataset, validation_windows
from gpt.loop import Trainer, TrainingSettings
from gpt.machine import limit_threads, load_optimizers
from gpt.model import GPTConfig
from gpt.progress import Scale
from gpt.report import Report, SilentReport
from gpt.sample import generate

import echelon.dist as dist
from echelon import recorder

if TYPE_CHECKING:
    from echelon.dist.group import ProcessGroup

PROMPT = b"def "
SAMPLE_BYTES = 400


@dataclass(frozen=True, kw_only=True)
class Job:
    """Everything that can be known, read and checked before the ranks meet."""

    options: argparse.Namespace
    config: GPTConfig
    settings: TrainingSettings
    dataset: Dataset
    resumed: dict[str, Any] | None

    @property
    def identity(self) -> dict[str, int]:
        """What a checkpoint and the run that resumes it must have in common."""
        return identity_of(self.config, self.settings, self.dataset)


def build_parser() -> argparse.ArgumentParser:
    """Describe the command line."""
    parser = OneLineParser(
        description=__doc__.partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    at_least_0, at_least_1 = whole_number(0), whole_number(1)
    model = parser.add_argument_group("model")
    model.add_argument("--layers", type=at_least_1, default=4)
    model.add_argument("--width", type=at_least_1, default=128)
    model.add_argument("--heads", type=at_least_1, default=4)
    model.add_argument("--context", type=at_least_1, default=128, help="bytes it looks back")

    training = parser.add_argument_group("training")
    training.add_argument("--steps", type=at_least_1, default=1200)
    training.add_argument("--batch", type=at_least_1, default=16, help="sequences, over all ranks")
    training.add_argument("--lr", type=positive_number, default=3e-3, help="highest learning rate")
    training.add_argument("--warmup", type=at_least_0, default=50, help="steps to the highest rate")
    training.add_argument("--clip", type=positive_number, default=1.0, help="largest gradient norm")
    training.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32", help="of compute")
    training.add_argument("--seed", type=at_least_0, default=0)
    training.add_argument("--backend", help="of the collectives (default: by device and hosts)")

    files = parser.add_argument_group("files")
    files.add_argument(
        "--data", type=Path, metavar="FILE", help="text to learn (default: Python's own source)"
    )
    files.add_argument(
        "--checkpoint",
        type=Path,
        metavar="FILE",
        help="where to save, at the end at least; {step} in the name becomes the step",
    )
    files.add_argument("--checkpoint-every", type=at_least_1, metavar="STEPS")
    files.add_argument("--resume", type=Path, metavar="FILE", help="checkpoint to go on from")
    files.add_argument("--log", type=Path, metavar="FILE", help="one JSON line a step")

    watching = parser.add_argument_group("watching")
    watching.add_argument("--eval-every", type=at_least_1, default=400, metavar="STEPS")
    watching.add_argument("--eval-windows", type=at_least_1, default=512, help="held-out windows")
    return parser


def prepare(options: argparse.Namespace) -> Job:
    """Read and check all that the options name, so that mistakes end the job before it starts.

    Raises:
        ValueError: the options contradict each other or the text.
        OSError: a file cannot be read.
        CheckpointError: the checkpoint is not one of this run.
    """
    if options.checkpoint_every and not options.checkpoint:
        raise ValueError("--checkpoint-every needs --checkpoint FILE")
    for path in filter(None, (options.checkpoint, options.log)):
        require_folder_of(path)
    config = GPTConfig(
        layers=options.layers, width=options.width, heads=options.heads, context=options.context
    )
    settings = TrainingSettings(
        steps=options.steps,
        batch=options.batch,
        lr=options.lr,
        warmup=options.warmup,
        clip=options.clip,
        seed=options.seed,
        bf16=options.dtype == "bf16",
    )
    dataset = load_dataset(options.data)
    dataset.require_windows_of(config.context + 1)
    resumed = None
    if options.resume:
        identity = identity_of(config, settings, dataset)
        resumed = load_checkpoint(options.resume, identity=identity)
    return Job(options=options, config=config, settings=settings, dataset=dataset, resumed=resumed)


def identity_of(config: GPTConfig, settings: TrainingSettings, dataset: Dataset) -> dict[str, int]:
    """Name what fixes the weights' shapes and the order of the data."""
    return {
        **asdict(config),
        "batch": settings.batch,
        "seed": settings.seed,
        "text": dataset.fingerprint,
    }


def require_folder_of(path: Path) -> None:
    """Check that a file can be made at `path`, rather than find out after hours of training.

    Raises:
        ValueError: there is no such folder, or the path is one.
    """
    if not path.parent.is_dir() or path.is_dir():
        raise ValueError(f"cannot write {path}: no such folder, or a folder itself")


def build_report(job: Job, trainer: Trainer) -> Report:
    """Give rank 0 a voice, and the other ranks a silent one."""
    if trainer.world.rank != 0:
        return SilentReport()
    scale = Scale(
        num_steps=job.settings.steps,
        tokens_per_step=job.settings.batch * job.config.context,
        flops_per_token=trainer.model.flops_per_token(),
    )
    return Report(scale, first_step=trainer.step, log=job.options.log)


def introduce(job: Job, trainer: Trainer, report: Report) -> None:
    """Say what is trained on what."""
    config, train = job.config, job.dataset.train
    report.say(
        f"model: {config.layers} layers, width {config.width}, {config.heads} heads, context "
        f"{config.context}: {trainer.model.num_parameters():,} parameters, {job.options.dtype}"
    )
    report.say(
        f"text: {train.size / 1e6:.1f} MB of {job.options.data or 'the standard library'}, "
        f"{job.dataset.validation.size / 1e6:.1f} MB more held out"
    )
    report.say(f"world: {trainer.world.size} ranks, {trainer.world.backend}, {trainer.device}")
    if trainer.step:
        report.say(f"resumed {job.options.resume} after step {trainer.step}")


def train(job: Job, trainer: Trainer, report: Report) -> float:
    """Train to the last step and return the validation loss."""
    options = job.options
    windows = validation_windows(
        job.dataset.validation, num_windows=options.eval_windows, context=job.config.context
    )
    while trainer.step < options.steps:
        loss = trainer.train_step()
        report.step(trainer.step, loss)
        is_last = trainer.step == options.steps
        if not is_last and trainer.step % options.eval_every == 0:
            report.say(f"step {trainer.step}: validation loss {trainer.validate(windows):.4f}")
            report.pause_ended()
        if is_last or is_due(trainer.step, options.checkpoint_every):
            save(job, trainer)
            report.pause_ended()
    return trainer.validate(windows)


def is_due(step: int, every: int | None) -> bool:
    """Say whether something done every so many steps is due after this one."""
    return every is not None and step % every == 0


def save(job: Job, trainer: Trainer) -> None:
    """Save a checkpoint, if one is wanted: rank 0 writes, as all ranks hold the same state."""
    if job.options.checkpoint is None or trainer.world.rank != 0:
        return
    path = Path(str(job.options.checkpoint).replace("{step}", str(trainer.step)))
    with recorder.span("checkpoint"):
        save_checkpoint(path, {"identity": job.identity, **trainer.state_dict()})


def conclude(job: Job, trainer: Trainer, report: Report, validation_loss: float) -> None:
    """Print what the run came to. Nothing here needs the other ranks."""
    dataset, seed = job.dataset, job.settings.seed
    if report.progress.num_steps_seen:
        report.say(report.progress.summary())
    report.say(f"validation loss {validation_loss:.4f} nats a byte, on text it never trained on")
    bigram = bigram_loss(dataset.train, dataset.validation)
    report.say(f"bigram loss     {bigram:.4f} nats a byte, same split: what needs no attention")
    sample = generate(trainer.model, PROMPT, num_bytes=SAMPLE_BYTES, seed=seed)
    report.say(f"sample:\n{sample}")


def run(job: Job, world: ProcessGroup) -> None:
    """Train on this rank, and say how it went if this is rank 0."""
    trainer = Trainer.build(job.config, job.settings, job.dataset.train, world=world)
    if job.resumed:
        trainer.load_state_dict(job.resumed)
    report = build_report(job, trainer)
    introduce(job, trainer, report)
    validation_loss = train(job, trainer, report)
    dist.shutdown()
    if world.rank == 0:
        conclude(job, trainer, report, validation_loss)
    report.close()


def main() -> None:
    """Read the command line, join the other ranks and train."""
    sys.stdout.reconfigure(errors="replace")  # a sample may hold what a terminal cannot show
    parser = build_parser()
    try:
        job = prepare(parser.parse_args())
    except (ValueError, OSError, CheckpointError) as error:
        parser.error(str(error))
    limit_threads()
    load_optimizers()
    try:
        world = dist.init(job.options.backend)
    except ValueError as error:
        parser.error(str(error))
    if job.settings.batch < world.size:
        parser.error(f"--batch {job.settings.batch} leaves some of {world.size} ranks without data")
    run(job, world)


if __name__ == "__main__":
    main()
