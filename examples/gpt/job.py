"""A run as it was asked for: all that can be known, read and checked before the ranks meet."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from echelon.dist.checkpoint import peek
from echelon.errors import CheckpointError
from echelon.train.models import ModelConfig
from echelon.train.models import gpt2 as gpt2_model
from echelon.train.models import llama as llama_model
from echelon.train.settings import differences, to_dict
from gpt.model.transformer import GPTConfig
from gpt.settings import Settings
from gpt.text.corpus import Corpus, load_corpus
from gpt.training.checkpoints import AUTO, STEP
from gpt.training.loop import TrainingSettings, open_source

if TYPE_CHECKING:
    from echelon.dist.group import ProcessGroup

ROUNDED_FROM = 1024  # a vocabulary that large is rounded up: matrix products like multiples of 64
MULTIPLE = 64


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is trained on what, and how."""

    settings: Settings
    config: GPTConfig | ModelConfig
    training: TrainingSettings
    corpus: Corpus

    @cached_property
    def identity(self) -> dict[str, Any]:
        """What a checkpoint and the run that resumes it must have in common.

        It fixes the weights' shapes and the order of the data. Neither the number of ranks nor the
        size of the batch is in it; the position in the data knows its tokens by itself.
        """
        return {**asdict(self.config), "seed": self.training.seed}

    def require_same_run(self, path: Path) -> None:
        """Check that a checkpoint comes from a run that this one can go on with.

        Raises:
            CheckpointError: it does not; the message lists every difference.
            ValueError: its position is one in other data.
        """
        saved = peek(path)
        before = saved.get("identity", {})
        different = [
            f"{name} {before.get(name)} there, {value} here"
            for name, value in self.identity.items()
            if before.get(name) != value
        ]
        if different:
            raise CheckpointError(
                f"{path} belongs to another run: {', '.join(different)}", path=path
            )
        if "data" not in saved:
            raise CheckpointError(f"{path} has no position in the data", path=path)
        source = open_source(self.corpus, self.config, self.training, rank=0, world_size=1)
        try:
            source.load_state_dict(saved["data"])
        except ValueError as error:
            raise ValueError(f"{path} belongs to other data: {error}") from error
        finally:
            source.close()

    def changes_since(self, path: Path) -> list[str]:
        """Return the settings of training that differ from those in a checkpoint."""
        saved, now = peek(path).get("settings", {}), to_dict(self.settings)
        sections = ("model", "data", "training", "machine")
        before, after = ({name: all_.get(name, {}) for name in sections} for all_ in (saved, now))
        return differences(before, after)

    def require_same_data(self, world: ProcessGroup) -> None:
        """Check that all hosts read the same tokens. Collective.

        Raises:
            ValueError: they do not; names the ranks that differ from rank 0.
        """
        found = world.all_gather_object(self.corpus.fingerprint)
        different = [rank for rank, numbers in enumerate(found) if numbers != found[0]]
        if different:
            ranks = ", ".join(map(str, different))
            raise ValueError(
                f"{self.corpus.name}: ranks {ranks} read other tokens than rank 0: "
                "give all hosts the same files"
            )


def prepare(settings: Settings) -> Job:
    """Read and check all that the settings name, so that mistakes end the job before it starts.

    Raises:
        ValueError: the settings contradict each other or the text.
        OSError: a file cannot be read.
        CheckpointError: the checkpoint is not one of this run.
        TokenShardsError: a folder is not one of token shards.
    """
    require_consistent(settings)
    make_config(settings)  # what is wrong with the sizes is found before a text is prepared
    corpus = load_corpus(settings.data.sources, vocabulary=settings.model.vocabulary)
    config = make_config(settings, corpus.vocabulary.size)
    training = training_settings(settings)
    if training.pipeline > config.layers:
        raise ValueError(f"--pipeline {training.pipeline}: there are only {config.layers} layers")
    corpus.require_windows_of(config.context + 1)
    job = Job(settings=settings, config=config, training=training, corpus=corpus)
    if settings.checkpoint.resume not in (None, AUTO):
        job.require_same_run(Path(settings.checkpoint.resume))
    return job


def require_consistent(settings: Settings) -> None:
    """Check what needs no file.

    Raises:
        ValueError: settings contradict each other, or a folder to write into does not exist.
    """
    checkpoint, machine = settings.checkpoint, settings.machine
    for flag, value in (
        ("--checkpoint-every", checkpoint.every),
        ("--save-every-s", checkpoint.every_s),
        ("--resume auto", checkpoint.resume == AUTO),
    ):
        if value and not checkpoint.path:
            raise ValueError(f"{flag} needs --checkpoint FOLDER")
    if checkpoint.path and STEP in str(Path(checkpoint.path).parent):
        raise ValueError(f"--checkpoint {checkpoint.path}: {STEP} belongs into the last name")
    for path in filter(None, (checkpoint.path, settings.report.log)):
        require_folder_of(Path(path))
    if machine.microbatches and machine.microbatches > 1 and machine.pipeline == 1:
        raise ValueError("--microbatches needs --pipeline")
    if machine.pipeline > 1:
        require_pipelined(settings)
    if settings.data.mask_documents and settings.model.kind == "gpt":
        raise ValueError("--mask-documents needs --model gpt2 or llama")


def require_pipelined(settings: Settings) -> None:
    """Check that a pipeline can do what is asked for.

    Raises:
        ValueError: it cannot.
    """
    machine = settings.machine
    for flag, is_asked in (
        (f"--model {settings.model.kind}", settings.model.kind != "gpt"),
        ("--accumulate: its micro-batches do that", settings.training.accumulate > 1),
        ("--checkpoint-activations", machine.checkpoint_activations != "none"),
    ):
        if is_asked:
            raise ValueError(f"--pipeline does not go together with {flag}")


def require_folder_of(path: Path) -> None:
    """Check that something can be made at `path`, rather than find out after hours of training.

    Raises:
        ValueError: there is no such folder.
    """
    if not path.parent.is_dir():
        raise ValueError(f"cannot write {path}: no such folder")


def make_config(settings: Settings, known: int = 1) -> GPTConfig | ModelConfig:
    """Return the model's sizes.

    Args:
        known: the tokens that the data has.

    Raises:
        ValueError: no model can have them.
    """
    model = settings.model
    rounded = -(-known // MULTIPLE) * MULTIPLE if known > ROUNDED_FROM else known
    vocabulary = model.vocabulary or rounded
    if vocabulary < known:
        raise ValueError(f"--vocabulary {vocabulary}: the data has {known} tokens")
    sizes = {
        "layers": model.layers,
        "width": model.width,
        "heads": model.heads,
        "context": model.context,
        "vocabulary": vocabulary,
    }
    if model.kv_heads is not None and model.kind != "llama":
        raise ValueError("model.kv_heads needs --model llama")
    if model.kind == "gpt":
        return GPTConfig(**sizes)
    if model.kind == "gpt2":
        return gpt2_model(**sizes)
    return llama_model(**sizes, kv_heads=model.kv_heads or 0, hidden=0)


def training_settings(settings: Settings) -> TrainingSettings:
    """Return what a trainer is told.

    Raises:
        ValueError: there is no such way to checkpoint activations.
    """
    training, machine = settings.training, settings.machine
    mode, every = read_activations(machine.checkpoint_activations)
    microbatches = machine.microbatches or (2 * machine.pipeline if machine.pipeline > 1 else 1)
    return TrainingSettings(
        steps=training.steps,
        batch=training.batch,
        lr=training.lr,
        warmup=training.warmup,
        clip=training.clip,
        seed=training.seed,
        optimizer=training.optimizer,
        schedule=training.schedule,
        accumulate=training.accumulate,
        max_skipped=training.max_skipped,
        device=machine.device,
        bf16=machine.mixed_precision == "bf16",
        fp16=machine.mixed_precision == "fp16",
        shard=machine.shard,
        compile=machine.compile,
        pipeline=machine.pipeline,
        microbatches=microbatches,
        activations=mode,
        activations_every=every,
        mask_documents=settings.data.mask_documents,
        workers=settings.data.workers,
    )


def read_activations(text: str) -> tuple[str, int]:
    """Return the mode and the interval of `full`, `every=N`, `selective` or `none`.

    Raises:
        ValueError: it is none of them.
    """
    if text in ("none", "full", "selective"):
        return text, 1
    name, _, number = text.partition("=")
    if name == "every" and number.isdecimal() and int(number) > 0:
        return "full", int(number)
    raise ValueError(f"--checkpoint-activations is {text!r}, not full, every=N, selective or none")


def unfit(training: TrainingSettings, world_size: int) -> str | None:
    """Return why these settings are not for so many ranks, None if they are."""
    stages, parts = training.pipeline, training.microbatches
    if world_size % stages:
        return f"--pipeline {stages} does not divide {world_size} ranks"
    data_size = world_size // stages
    if training.batch < data_size:
        return f"--batch {training.batch} leaves some of {world_size} ranks without data"
    if training.batch // data_size < parts:
        return (
            f"--batch {training.batch} over {data_size} ranks of a stage cannot be split into "
            f"{parts} micro-batches"
        )
    if training.batch // data_size < training.accumulate:
        return (
            f"--batch {training.batch} over {world_size} ranks cannot be accumulated from "
            f"{training.accumulate} passes"
        )
    return None
