"""Train a GPT on real text, data-parallel or sharded over all ranks that the launcher started.

    echelon run --nproc-per-node 2 examples/train_gpt.py
    echelon run --nproc-per-node 2 examples/train_gpt.py --steps 300 --data my_book.txt
    echelon run --nproc-per-node 2 examples/train_gpt.py --preset shakespeare --shard
    echelon run --nproc-per-node 4 examples/train_gpt.py --model llama --data web:0.8 code:0.2
    echelon run --nproc-per-node 4 --max-restarts 9 examples/train_gpt.py \
        --config run.toml --checkpoint gpt --checkpoint-every 100 --resume auto

By default, it reads the source code of the Python that runs it: tens of megabytes that exist on
every machine. Finally, it prints the validation loss, the loss of a bigram model on the same split
(which a model without attention cannot beat), and a sample of generated text. A checkpoint from any
number of ranks can be resumed on any other number, sharded or not.

The parts are in `gpt/`, one noun per file; start with `gpt/training/loop.py`, and see
`gpt/settings.py` for all settings.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from gpt.flags import build_parser, read_settings
from gpt.job import AUTO, Job, prepare, unfit
from gpt.model.sample import generate
from gpt.output.peak import find_peak
from gpt.output.progress import Scale, with_unit
from gpt.output.report import Report
from gpt.output.writers import open_writers
from gpt.text.bigram import bigram_loss
from gpt.text.data import tokens_in_pieces, validation_windows
from gpt.training.loop import Trainer
from gpt.training.machine import choose_device, describe, limit_threads, load_optimizers

import echelon.dist as dist
from echelon import recorder
from echelon.dist.checkpoint import Keeper, SaveSchedule, peek
from echelon.dist.checkpoint.disk.damage import DamagedError
from echelon.errors import CheckpointError, TokenShardsError
from echelon.train.models.hugging_face import save_pretrained
from echelon.train.settings import to_dict, to_toml

if TYPE_CHECKING:
    from echelon.dist.group import ProcessGroup

PROMPT = b"def "
SAMPLE_TOKENS = {"byte": 400, "character": 400, "word": 100, "token": 100}
BIGRAM_TOKENS = 8 << 20  # enough text to count pairs in
STOPPED = 143  # the exit code of a run that SIGTERM ended: 128 + 15


def build_report(job: Job, trainer: Trainer) -> Report:
    """Create the report, which rank 0 prints. Collective."""
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
        with contextlib.suppress(OSError):  # a full disk does not end a run, but the log reports it
            Path(log + ".toml").write_text(to_toml(job.settings), encoding="utf-8")
    report, step, writers = job.settings.report, trainer.step, None
    if report.tensorboard or report.wandb:
        config = to_dict(job.settings)
        writers = open_writers(report, first_step=step, config=config) if world.rank == 0 else []
    return Report(
        scale, first_step=step, log=log, writers=writers, world=world, device=trainer.device
    )


def introduce(job: Job, trainer: Trainer, report: Report, saved: dict[str, Any] | None) -> None:
    """Report the model, the data and, in a resumed run, the settings that have changed."""
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
    if job.training.tp > 1:
        shared += f" of layers in {job.training.tp} parts"
    if job.training.pipeline > 1:
        shared = f"{job.training.pipeline} stages of {shared}"
    compiled = ", compiled blocks" if job.training.compile else ""
    world = trainer.world
    where = describe(trainer.device)
    report.say(f"world: {world.size} ranks, {shared}, {world.backend}, {where}{compiled}")
    if saved is not None:
        checkpoint = job.settings.checkpoint
        path = checkpoint.path if checkpoint.resume == AUTO else checkpoint.resume
        report.say(f"resumed {path} after step {trainer.step}")
        for change in job.changes_since(saved):
            report.say(f"changed: {change}")


def train(job: Job, trainer: Trainer, report: Report) -> float | None:
    """Train to the last step; return the validation loss, or None if SIGTERM ended it early.

    Raises:
        CheckpointError: the last checkpoint could not be saved, or another job uses the folder.
    """
    settings, num_steps = job.settings, job.settings.training.steps
    windows = validation_windows(
        job.corpus.validation,
        num_windows=settings.report.eval_windows,
        context=job.config.context,
    )
    saves = Saves(job, trainer, report) if settings.checkpoint.path is not None else None
    while trainer.step < num_steps:
        report.step(trainer, trainer.train_step())
        is_last, loss = trainer.step == num_steps, None
        if not is_last and trainer.step % settings.report.eval_every == 0:
            loss = validate(trainer, windows, report)
        # without a checkpoint folder, SIGTERM ends the ranks at once
        is_stopped = saves is not None and not is_last and dist.should_stop()
        if saves is not None and not is_last:
            saves.save(loss, is_last=is_stopped)
        if is_stopped:
            report.say(f"stopped after step {trainer.step}: {dist.stop_reason()}")
            return None
    loss = validate(trainer, windows, report, is_told=False)
    if saves is not None:
        saves.save(loss, is_last=True)
    return loss


class Saves:
    """The checkpoints of a run, saved when they are due; all but the last save asynchronously."""

    def __init__(self, job: Job, trainer: Trainer, report: Report) -> None:
        settings = job.settings.checkpoint
        self.job, self.trainer, self.report = job, trainer, report
        self.keeper = Keeper(
            settings.path,
            keep=settings.keep,
            keep_every=settings.keep_every,
            best="lowest" if settings.best else None,
            patience_s=settings.patience_s,
        )
        self.schedule = None
        if settings.every or settings.every_s:
            self.schedule = SaveSchedule(every_steps=settings.every, every_s=settings.every_s)

    def save(self, loss: float | None, *, is_last: bool) -> None:
        """Save a checkpoint if one is due, with its validation loss. Collective.

        Raises:
            CheckpointError: the last checkpoint was not saved, or another job uses the folder.
        """
        step = self.trainer.step
        is_due = self.schedule is not None and self.schedule.due(step)
        if not (is_due or is_last):
            return
        with self.report.pause():
            state = {**self.job.extras, **self.trainer.state()}
            is_saved = self.keeper.save(step, state, async_op=not is_last, score=loss)
        if is_last and not is_saved:
            raise CheckpointError(f"{self.keeper.folder}: step {step} is not saved")


def validate(trainer: Trainer, windows: object, report: Report, *, is_told: bool = True) -> float:
    """Return the validation loss, and log it. Collective."""
    with report.pause(), recorder.span("evaluate"):
        loss = trainer.validate(windows)
    report.note(trainer.step, validation_loss=loss)
    if is_told:
        report.say(f"step {trainer.step}: validation loss {loss:.4f}")
    return loss


def conclude(job: Job, model: torch.nn.Module, report: Report, validation_loss: float) -> None:
    """Print the results of the run. Not collective."""
    corpus, seed = job.corpus, job.training.seed
    unit, size = corpus.vocabulary.unit, corpus.vocabulary.size
    if report.progress.num_steps_seen:
        report.say(report.progress.summary())
    report.say(f"validation loss {validation_loss:.4f} nats per {unit}, on unseen text")
    train, validation = (
        tokens_in_pieces(part, at_most=BIGRAM_TOKENS) for part in (corpus.train, corpus.validation)
    )
    bigram = bigram_loss(train, validation, size)
    report.say(f"bigram loss     {bigram:.4f} nats per {unit}, same split: needs no attention")
    sample = generate(model, corpus.vocabulary, PROMPT, num_tokens=SAMPLE_TOKENS[unit], seed=seed)
    report.say(f"sample:\n{sample}")


def resume(job: Job, trainer: Trainer) -> dict[str, Any] | None:
    """Continue from the requested checkpoint, if there is one; return its state. Collective.

    Raises:
        CheckpointError: the checkpoint is damaged, or belongs to another run.
        ValueError: the checkpoint belongs to other data, or does not fit.
    """
    checkpoint = job.settings.checkpoint
    path = checkpoint.path if checkpoint.resume == AUTO else checkpoint.resume
    if path is None or checkpoint.resume is None:
        return None
    found = [False, ""]  # rank 0's view: another job may be saving or removing at this moment
    if trainer.world.rank == 0:
        try:
            job.require_same_run(path, peek(path))
            found[0] = True
        except (CheckpointError, ValueError, OSError) as error:
            is_beginning = checkpoint.resume == AUTO and not is_any(path)
            found[1] = "" if is_beginning else str(error)
    is_found, problem = trainer.world.broadcast_object(found, root=0)
    if problem:
        raise CheckpointError(problem, path=path)
    if not is_found:
        return None
    state = trainer.resume(path)  # the folder, so that an older one is used if the newest is torn
    job.require_same_run(path, state)
    return state


def is_any(path: str) -> bool:
    """Return whether a checkpoint exists, even a damaged one, so that a run must not start over."""
    try:
        peek(path)
    except (DamagedError, OSError):  # an unreadable checkpoint may exist
        return True
    except CheckpointError:
        return False
    return True


def begin(job: Job, world: ProcessGroup) -> tuple[Trainer, dict[str, Any] | None]:
    """Create this rank's trainer; return it and the checkpoint that it continues from. Collective.

    Raises:
        CheckpointError: the checkpoint cannot be read, or belongs to another run.
        ValueError: the settings, the ranks, the data and the checkpoint do not fit each other.
    """
    reason = unfit(job.training, world.size)
    if reason:
        raise ValueError(reason)
    job.require_same_data(world)
    trainer = Trainer.build(job.config, job.training, job.corpus, world=world)
    return trainer, resume(job, trainer)


def run(job: Job, trainer: Trainer, saved: dict[str, Any] | None) -> int:
    """Train on this rank, report if this is rank 0, and return the exit code.

    Raises:
        CheckpointError: the last checkpoint cannot be saved, or another job uses the folder.
    """
    report = build_report(job, trainer)
    introduce(job, trainer, report, saved)
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
    model = trainer.whole()
    if job.settings.checkpoint.export_hf:
        save_pretrained(model, job.settings.checkpoint.export_hf)
        report.say(f"written for transformers: {job.settings.checkpoint.export_hf}")
    dist.shutdown()
    if trainer.world.rank == 0:
        conclude(job, model, report, validation_loss)
    report.close()
    return 0


def described(error: Exception) -> str:
    """Return an error's text; for an OS error, the file and the reason."""
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return str(error)


def main() -> None:
    """Parse the command line, join the other ranks and train."""
    sys.stdout.reconfigure(errors="replace")  # a sample may contain what a terminal cannot show
    warnings.formatwarning = lambda message, *_: f"warning: {message}\n"
    parser = build_parser(__doc__.partition("\n")[0])
    try:
        job = prepare(read_settings(parser))
    except (ValueError, TypeError, OSError, CheckpointError, TokenShardsError) as error:
        parser.error(described(error))
    limit_threads()
    load_optimizers()
    try:
        choose_device(job.training.device)  # before the ranks meet: NCCL binds to it
        trainer, saved = begin(job, dist.init(job.settings.machine.backend))
    except (ValueError, CheckpointError) as error:
        parser.error(str(error))
    except OSError as error:  # a file system or a store that may be available again later
        parser.exit(1, f"{parser.prog}: error: {described(error)}\n")
    try:
        code = run(job, trainer, saved)
    except CheckpointError as error:
        parser.exit(1, f"{parser.prog}: error: {error}\n")
    if code:
        sys.exit(code)


if __name__ == "__main__":
    main()
