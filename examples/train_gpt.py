"""Train a GPT on real text, data-parallel or sharded over every rank that the launcher started.

    echelon run --nproc-per-node 2 examples/train_gpt.py
    echelon run --nproc-per-node 2 examples/train_gpt.py --steps 300 --data my_book.txt
    echelon run --nproc-per-node 2 examples/train_gpt.py --preset shakespeare --shard
    echelon run --nproc-per-node 4 examples/train_gpt.py --model llama --data web:0.8 code:0.2
    echelon run --nproc-per-node 4 --max-restarts 9 examples/train_gpt.py \
        --config run.toml --checkpoint gpt --checkpoint-every 100 --resume auto

By default it reads the source text of the Python that runs it: on every machine, tens of megabytes,
nothing to download. It ends with the validation loss, the loss of a bigram model of the same split
(which a model that does not attend cannot beat), and a sample of what it has learnt to write.
A checkpoint of any number of ranks is resumed by any other, sharded or not.

The parts are in `gpt/`, one noun per file; start with `gpt/training/loop.py`, and `gpt/settings.py`
for all that can be set.
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from gpt.flags import build_parser, read_settings
from gpt.job import Job, prepare, unfit
from gpt.model.sample import generate
from gpt.output.peak import find_peak
from gpt.output.progress import Scale, with_unit
from gpt.output.report import Report
from gpt.text.bigram import bigram_loss
from gpt.text.data import tokens_in_pieces, validation_windows
from gpt.training.checkpoints import AUTO, Timetable, choose_together, path_at
from gpt.training.loop import Trainer, Wishes
from gpt.training.machine import choose_device, describe, limit_threads, load_optimizers
from gpt.training.pipeline import PipelineTrainer

import echelon.dist as dist
from echelon import recorder
from echelon.errors import CheckpointError, TokenShardsError
from echelon.train.settings import to_dict, to_toml

if TYPE_CHECKING:
    from echelon.dist.group import ProcessGroup

PROMPT = b"def "
SAMPLE_TOKENS = {"byte": 400, "character": 400, "word": 100, "token": 100}
BIGRAM_TOKENS = 8 << 20  # enough of the text to count pairs in
STOPPED = 143  # the exit code of a run that SIGTERM ended: 128 + 15


def build_report(job: Job, trainer: Trainer) -> Report:
    """Let rank 0 report. Collective."""
    dtype = job.training.half or torch.float32
    machine, world = job.settings.machine, trainer.world
    peak = find_peak(machine.peak_tflops, world, trainer.device, dtype)
    scale = Scale(
        num_steps=job.training.steps,
        tokens_per_step=job.training.batch * job.config.context,
        flops_per_token=job.config.flops_per_token(),
        peak=peak,
    )
    log = job.settings.report.log
    if world.rank == 0 and log:
        with contextlib.suppress(OSError):  # a full disk does not end a run: the log says so
            Path(log + ".toml").write_text(to_toml(job.settings), encoding="utf-8")
    return Report(scale, first_step=trainer.step, log=log, world=world, device=trainer.device)


def introduce(job: Job, trainer: Trainer, report: Report, resumed: Path | None) -> None:
    """Report what is trained on what."""
    config, corpus, unit = job.config, job.corpus, job.corpus.vocabulary.unit
    half = {torch.float16: "fp16 over fp32", torch.bfloat16: "bf16 over fp32"}
    report.say(
        f"model: {config.layers} layers, width {config.width}, {config.heads} heads, context "
        f"{config.context}: {config.num_parameters():,} parameters, "
        f"{half.get(job.training.half, 'fp32')}"
    )
    report.say(
        f"text: {with_unit(corpus.num_tokens, unit)}s of {corpus.name}, "
        f"{with_unit(corpus.num_held_out, unit)}s more held out"
    )
    shared = "shards" if job.training.shard else "replicas"
    if job.training.pipeline > 1:
        shared = f"{job.training.pipeline} stages of {shared}"
    compiled = ", compiled blocks" if job.training.compile else ""
    world = trainer.world
    where = describe(trainer.device)
    report.say(f"world: {world.size} ranks, {shared}, {world.backend}, {where}{compiled}")
    if resumed is not None:
        report.say(f"resumed {resumed} after step {trainer.step}")
        if world.rank == 0:
            for change in job.changes_since(resumed):
                report.say(f"changed: {change}")


def train(job: Job, trainer: Trainer, report: Report) -> float | None:
    """Train to the last step and return the validation loss; None if SIGTERM ended it before."""
    settings = job.settings
    windows = validation_windows(
        job.corpus.validation,
        num_windows=settings.report.eval_windows,
        context=job.config.context,
    )
    timetable = Timetable(settings.checkpoint)
    saves = settings.checkpoint.path is not None  # else SIGTERM ends the ranks at once
    while trainer.step < settings.training.steps:
        loss = trainer.train_step(Wishes(save=timetable.is_time()))
        report.step(trainer, loss)
        is_last = trainer.step == settings.training.steps
        if not is_last and trainer.step % settings.report.eval_every == 0:
            validate(trainer, windows, report)
        is_stopped = saves and dist.should_stop()
        if is_last or is_stopped or trainer.wishes.save or timetable.is_due(trainer.step):
            with report.pause():
                save(job, trainer, is_last=is_last or is_stopped)
            timetable.saved()
        if is_stopped and not is_last:
            report.say(f"stopped after step {trainer.step}: {dist.stop_reason()}")
            return None
    return validate(trainer, windows, report, is_told=False)


def validate(trainer: Trainer, windows: object, report: Report, *, is_told: bool = True) -> float:
    """Return the validation loss, and log it. Collective."""
    with report.pause(), recorder.span("evaluate"):
        loss = trainer.validate(windows)
    report.note(trainer.step, validation_loss=loss)
    if is_told:
        report.say(f"step {trainer.step}: validation loss {loss:.4f}")
    return loss


def save(job: Job, trainer: Trainer, *, is_last: bool) -> None:
    """Save a checkpoint, if one is wanted; all but the last one while training goes on."""
    checkpoint = job.settings.checkpoint
    if checkpoint.path is None:
        return
    trainer.save(
        path_at(checkpoint.path, trainer.step),
        job.identity,
        in_background=not is_last,
        keep=checkpoint.keep,
        settings=to_dict(job.settings),
    )


def conclude(job: Job, model: torch.nn.Module, report: Report, validation_loss: float) -> None:
    """Print what the run came to. Nothing here needs the other ranks."""
    corpus, seed = job.corpus, job.training.seed
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


def choose_checkpoint(job: Job, world: ProcessGroup) -> Path | None:
    """Return the checkpoint that the run goes on from, if there is one. Collective.

    Raises:
        CheckpointError: it is damaged, or not of this run.
        ValueError: it is one of other data.
    """
    checkpoint = job.settings.checkpoint
    if checkpoint.resume != AUTO:  # one that was named is checked before the ranks meet
        return Path(checkpoint.resume) if checkpoint.resume else None
    found = choose_together(checkpoint.path, world)
    if found is not None:
        job.require_same_run(found)
    return found


def run(job: Job, world: ProcessGroup, resumed: Path | None) -> int:
    """Train on this rank, report if this is rank 0, and return the exit code.

    Args:
        resumed: the checkpoint to go on from.
    """
    kind = PipelineTrainer if job.training.pipeline > 1 else Trainer
    trainer = kind.build(job.config, job.training, job.corpus, world=world)
    if resumed is not None:
        trainer.resume(resumed)
    report = build_report(job, trainer)
    introduce(job, trainer, report, resumed)
    if job.training.compile:
        with report.pause(), recorder.span("compile"):
            seconds = trainer.warm_up()
        report.say(f"compiled in {seconds:.1f} s")
    validation_loss = train(job, trainer, report)
    trainer.source.close()
    if validation_loss is None:
        dist.shutdown()
        report.close()
        return STOPPED
    model = trainer.parallel.whole()
    dist.shutdown()
    if world.rank == 0:
        conclude(job, model, report, validation_loss)
    report.close()
    return 0


def main() -> None:
    """Read the command line, join the other ranks and train."""
    sys.stdout.reconfigure(errors="replace")  # a sample may hold what a terminal cannot show
    parser = build_parser(__doc__.partition("\n")[0])
    try:
        job = prepare(read_settings(parser))
    except (ValueError, TypeError, OSError, CheckpointError, TokenShardsError) as error:
        parser.error(str(error))
    limit_threads()
    load_optimizers()
    try:
        choose_device(job.training.device)  # before the ranks meet: NCCL binds to it
        world = dist.init(job.settings.machine.backend)
    except ValueError as error:
        parser.error(str(error))
    reason = unfit(job.training, world.size)
    if reason:
        parser.error(reason)
    try:
        job.require_same_data(world)
        resumed = choose_checkpoint(job, world)
    except (ValueError, CheckpointError) as error:
        parser.error(str(error))
    code = run(job, world, resumed)
    if code:
        sys.exit(code)


if __name__ == "__main__":
    main()
