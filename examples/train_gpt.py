"""Train a GPT on real text, data-parallel or sharded over every rank that the launcher started.

    echelon run --nproc-per-node 2 examples/train_gpt.py
    echelon run --nproc-per-node 2 examples/train_gpt.py --steps 300 --data my_book.txt
    echelon run --nproc-per-node 2 examples/train_gpt.py --preset shakespeare --shard
    python examples/train_gpt.py --checkpoint gpt --checkpoint-every 100
    echelon run --nproc-per-node 4 examples/train_gpt.py --checkpoint gpt --resume gpt

By default it reads the source text of the Python that runs it: on every machine, tens of megabytes,
nothing to download. It ends with the validation loss, the loss of a bigram model of the same split
(which a model that does not attend cannot beat), and a sample of what it has learnt to write.
A checkpoint of any number of ranks is resumed by any other, sharded or not.

The parts are in `gpt/`, one noun per file; start with `gpt/training/loop.py`.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from gpt.arguments import OneLineParser, positive_number, whole_number
from gpt.model.presets import PRESETS
from gpt.model.sample import generate
from gpt.model.transformer import GPT, GPTConfig
from gpt.output.peak import find_peak
from gpt.output.progress import Scale, with_unit
from gpt.output.report import Report, SilentReport
from gpt.text.bigram import bigram_loss
from gpt.text.corpus import Corpus, load_corpus
from gpt.text.data import tokens_in_pieces, validation_windows
from gpt.training.loop import Trainer, TrainingSettings, open_source
from gpt.training.machine import choose_device, describe, limit_threads, load_optimizers
from gpt.training.pipeline import PipelineTrainer

import echelon.dist as dist
from echelon.dist.checkpoint import peek
from echelon.errors import CheckpointError, TokenShardsError

if TYPE_CHECKING:
    from echelon.dist.group import ProcessGroup

PROMPT = b"def "
SAMPLE_TOKENS = {"byte": 400, "character": 400, "word": 100, "token": 100}
BIGRAM_TOKENS = 8 << 20  # enough of the text to count pairs in


@dataclass(frozen=True, kw_only=True)
class Job:
    """Everything that can be known, read and checked before the ranks meet."""

    options: argparse.Namespace
    config: GPTConfig
    settings: TrainingSettings
    corpus: Corpus

    @property
    def identity(self) -> dict[str, int]:
        """What a checkpoint and the run that resumes it must have in common.

        It fixes the weights' shapes and the order of the data. Neither the number of ranks nor the
        size of the batch is in it; the position in the data knows its tokens by itself.
        """
        return {
            **asdict(self.config),
            "seed": self.settings.seed,
        }


def build_parser() -> argparse.ArgumentParser:
    """Describe the command line."""
    parser = OneLineParser(
        description=__doc__.partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    at_least_0, at_least_1 = whole_number(0), whole_number(1)
    parser.add_argument(
        "--preset", choices=PRESETS, default="small", help="defaults of the sizes below"
    )
    model = parser.add_argument_group("model")
    model.add_argument("--layers", type=at_least_1)
    model.add_argument("--width", type=at_least_1)
    model.add_argument("--heads", type=at_least_1)
    model.add_argument("--context", type=at_least_1, help="tokens it looks back")
    model.add_argument(
        "--vocabulary", type=at_least_1, help="256: bytes; fewer: characters; more: words"
    )

    training = parser.add_argument_group("training")
    training.add_argument("--steps", type=at_least_1)
    training.add_argument("--batch", type=at_least_1, help="sequences, over all ranks")
    training.add_argument("--lr", type=positive_number, help="highest learning rate")
    training.add_argument("--warmup", type=at_least_0, help="steps to the highest rate")
    training.add_argument("--clip", type=positive_number, default=1.0, help="largest gradient norm")
    training.add_argument("--seed", type=at_least_0, default=0)

    how = parser.add_argument_group("how")
    how.add_argument("--shard", action="store_true", help="divide the model among the ranks")
    how.add_argument(
        "--pipeline",
        type=at_least_1,
        default=1,
        metavar="STAGES",
        help="divide the model into stages, one after the other; the number of ranks divides by it",
    )
    how.add_argument(
        "--microbatches",
        type=at_least_1,
        metavar="N",
        help="of a pipeline (default: twice the stages)",
    )
    how.add_argument(
        "--mixed-precision",
        choices=("no", "bf16", "fp16"),
        default="no",
        help="what to compute in; weights and sums stay float32, and fp16 scales the loss",
    )
    how.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="where to compute; auto: the GPU of the local rank, if there is one",
    )
    how.add_argument("--compile", action="store_true", help="the blocks, by torch.compile")
    how.add_argument(
        "--peak-tflops",
        type=positive_number,
        metavar="T",
        help="of one rank's processor; what MFU is a share of (default: measured)",
    )
    training.add_argument("--backend", help="of the collectives (default: by device and hosts)")

    files = parser.add_argument_group("files")
    files.add_argument(
        "--data",
        nargs="+",
        default=[],
        metavar="PATH[:WEIGHT]",
        help="text files, or folders that `echelon prepare` made (default: Python's own source)",
    )
    files.add_argument(
        "--checkpoint",
        type=Path,
        metavar="FOLDER",
        help="where to save, at the end at least; {step} in the name becomes the step",
    )
    files.add_argument("--checkpoint-every", type=at_least_1, metavar="STEPS")
    files.add_argument("--resume", type=Path, metavar="FOLDER", help="checkpoint to go on from")
    files.add_argument("--log", type=Path, metavar="FILE", help="one JSON line a step")

    watching = parser.add_argument_group("watching")
    watching.add_argument("--eval-every", type=at_least_1, metavar="STEPS")
    watching.add_argument("--eval-windows", type=at_least_1, help="held-out windows")
    return parser


def read_options(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Read the command line; the preset gives the defaults."""
    preset = parser.parse_args().preset
    parser.set_defaults(**PRESETS[preset])
    return parser.parse_args()


def prepare(options: argparse.Namespace) -> Job:
    """Read and check all that the options name, so that mistakes end the job before it starts.

    Raises:
        ValueError: the options contradict each other or the text.
        OSError: a file cannot be read.
        CheckpointError: the checkpoint is not one of this run.
    """
    if options.checkpoint_every and not options.checkpoint:
        raise ValueError("--checkpoint-every needs --checkpoint FOLDER")
    for path in filter(None, (options.checkpoint, options.log)):
        require_folder_of(path)
    corpus = load_corpus(options.data, vocabulary=options.vocabulary)
    config = GPTConfig(
        layers=options.layers,
        width=options.width,
        heads=options.heads,
        context=options.context,
        vocabulary=max(options.vocabulary, corpus.vocabulary.size),
    )
    microbatches = options.microbatches or (2 * options.pipeline if options.pipeline > 1 else 1)
    if microbatches > 1 and options.pipeline == 1:
        raise ValueError("--microbatches needs --pipeline")
    if options.pipeline > config.layers:
        raise ValueError(f"--pipeline {options.pipeline}: there are only {config.layers} layers")
    settings = TrainingSettings(
        steps=options.steps,
        batch=options.batch,
        lr=options.lr,
        warmup=options.warmup,
        clip=options.clip,
        seed=options.seed,
        device=options.device,
        bf16=options.mixed_precision == "bf16",
        fp16=options.mixed_precision == "fp16",
        shard=options.shard,
        compile=options.compile,
        pipeline=options.pipeline,
        microbatches=microbatches,
    )
    corpus.require_windows_of(config.context + 1)
    job = Job(options=options, config=config, settings=settings, corpus=corpus)
    if options.resume:
        require_identity(options.resume, job.identity)
        require_position(options.resume, job)
    return job


def require_identity(path: Path, wanted: dict[str, int]) -> None:
    """Check that a checkpoint comes from a run that this one can go on with.

    Raises:
        CheckpointError: it does not; the message lists every difference.
    """
    saved = peek(path).get("identity", {})
    different = [
        f"{name} {saved.get(name)} there, {value} here"
        for name, value in wanted.items()
        if saved.get(name) != value
    ]
    if different:
        raise CheckpointError(f"{path} belongs to another run: {', '.join(different)}", path=path)


def require_position(path: Path, job: Job) -> None:
    """Check that a checkpoint's position is one in this run's data.

    Raises:
        CheckpointError: the checkpoint has none.
        ValueError: it is one in other data.
    """
    position = peek(path).get("data")
    if position is None:
        raise CheckpointError(f"{path} has no position in the data", path=path)
    source = open_source(job.corpus, job.config, job.settings, rank=0, world_size=1)
    try:
        source.load_state_dict(position)
    except ValueError as error:
        raise ValueError(f"{path} belongs to other data: {error}") from error
    finally:
        source.close()


def require_folder_of(path: Path) -> None:
    """Check that something can be made at `path`, rather than find out after hours of training.

    Raises:
        ValueError: there is no such folder.
    """
    if not path.parent.is_dir():
        raise ValueError(f"cannot write {path}: no such folder")


def build_report(job: Job, trainer: Trainer) -> Report:
    """Give rank 0 a voice, and the other ranks a silent one. Collective."""
    dtype = job.settings.half or torch.float32
    peak = find_peak(job.options.peak_tflops, trainer.world, trainer.device, dtype)
    if trainer.world.rank != 0:
        return SilentReport()
    scale = Scale(
        num_steps=job.settings.steps,
        tokens_per_step=job.settings.batch * job.config.context,
        flops_per_token=job.config.flops_per_token(),
        peak=peak,
    )
    return Report(scale, first_step=trainer.step, log=job.options.log)


def introduce(job: Job, trainer: Trainer, report: Report) -> None:
    """Say what is trained on what."""
    config, corpus, unit = job.config, job.corpus, job.corpus.vocabulary.unit
    half = {torch.float16: "fp16 over fp32", torch.bfloat16: "bf16 over fp32"}
    report.say(
        f"model: {config.layers} layers, width {config.width}, {config.heads} heads, context "
        f"{config.context}: {config.num_parameters():,} parameters, "
        f"{half.get(job.settings.half, 'fp32')}"
    )
    report.say(
        f"text: {with_unit(corpus.num_tokens, unit)}s of {corpus.name}, "
        f"{with_unit(corpus.num_held_out, unit)}s more held out"
    )
    shared = "shards" if job.settings.shard else "replicas"
    if job.settings.pipeline > 1:
        shared = f"{job.settings.pipeline} stages of {shared}"
    compiled = ", compiled blocks" if job.settings.compile else ""
    world = trainer.world
    where = describe(trainer.device)
    report.say(f"world: {world.size} ranks, {shared}, {world.backend}, {where}{compiled}")
    if trainer.step:
        report.say(f"resumed {job.options.resume} after step {trainer.step}")


def train(job: Job, trainer: Trainer, report: Report) -> float:
    """Train to the last step and return the validation loss."""
    options = job.options
    windows = validation_windows(
        job.corpus.validation, num_windows=options.eval_windows, context=job.config.context
    )
    while trainer.step < options.steps:
        loss = trainer.train_step()
        report.step(trainer.step, loss)
        is_last = trainer.step == options.steps
        if not is_last and trainer.step % options.eval_every == 0:
            report.say(f"step {trainer.step}: validation loss {trainer.validate(windows):.4f}")
            report.pause_ended()
        if is_last or is_due(trainer.step, options.checkpoint_every):
            save(job, trainer, is_last=is_last)
            report.pause_ended()
    return trainer.validate(windows)


def is_due(step: int, every: int | None) -> bool:
    """Say whether something done every so many steps is due after this one."""
    return every is not None and step % every == 0


def save(job: Job, trainer: Trainer, *, is_last: bool) -> None:
    """Save a checkpoint, if one is wanted; all but the last one while training goes on."""
    if job.options.checkpoint is None:
        return
    path = Path(str(job.options.checkpoint).replace("{step}", str(trainer.step)))
    trainer.save(path, job.identity, in_background=not is_last)


def conclude(job: Job, model: GPT, report: Report, validation_loss: float) -> None:
    """Print what the run came to. Nothing here needs the other ranks."""
    corpus, seed = job.corpus, job.settings.seed
    unit, size = corpus.vocabulary.unit, corpus.vocabulary.size
    if report.progress.num_steps_seen:
        report.say(report.progress.summary())
    report.say(f"validation loss {validation_loss:.4f} nats a {unit}, on text it never trained on")
    train, validation = (
        tokens_in_pieces(part, at_most=BIGRAM_TOKENS) for part in (corpus.train, corpus.validation)
    )
    bigram = bigram_loss(train, validation, size)
    report.say(f"bigram loss     {bigram:.4f} nats a {unit}, same split: what needs no attention")
    sample = generate(model, corpus.vocabulary, PROMPT, num_tokens=SAMPLE_TOKENS[unit], seed=seed)
    report.say(f"sample:\n{sample}")


def run(job: Job, world: ProcessGroup) -> None:
    """Train on this rank, and say how it went if this is rank 0."""
    kind = PipelineTrainer if job.settings.pipeline > 1 else Trainer
    trainer = kind.build(job.config, job.settings, job.corpus, world=world)
    if job.options.resume:
        trainer.resume(job.options.resume)
    report = build_report(job, trainer)
    introduce(job, trainer, report)
    if job.settings.compile:
        report.say(f"compiled in {trainer.warm_up():.1f} s")
        report.pause_ended()
    validation_loss = train(job, trainer, report)
    trainer.source.close()
    model = trainer.parallel.whole()
    dist.shutdown()
    if world.rank == 0:
        conclude(job, model, report, validation_loss)
    report.close()


def unfit(settings: TrainingSettings, world_size: int) -> str | None:
    """Return why these settings are not for so many ranks, None if they are."""
    stages, microbatches = settings.pipeline, settings.microbatches
    if world_size % stages:
        return f"--pipeline {stages} does not divide {world_size} ranks"
    data_size = world_size // stages
    if settings.batch < data_size:
        return f"--batch {settings.batch} leaves some of {world_size} ranks without data"
    if settings.batch // data_size < microbatches:
        return (
            f"--batch {settings.batch} over {data_size} ranks of a stage cannot be split into "
            f"{microbatches} micro-batches"
        )
    return None


def main() -> None:
    """Read the command line, join the other ranks and train."""
    sys.stdout.reconfigure(errors="replace")  # a sample may hold what a terminal cannot show
    parser = build_parser()
    try:
        job = prepare(read_options(parser))
    except (ValueError, OSError, CheckpointError, TokenShardsError) as error:
        parser.error(str(error))
    limit_threads()
    load_optimizers()
    try:
        choose_device(job.options.device)  # before the ranks meet: NCCL binds to it
        world = dist.init(job.options.backend)
    except ValueError as error:
        parser.error(str(error))
    reason = unfit(job.settings, world.size)
    if reason:
        parser.error(reason)
    run(job, world)


if __name__ == "__main__":
    main()
