"""The requested run: everything that can be read and checked before the ranks connect."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from echelon.dist.checkpoint import peek
from echelon.errors import CheckpointError
from echelon.train.models import ModelConfig
from echelon.train.models import gpt2 as gpt2_model
from echelon.train.models import llama as llama_model
from echelon.train.models.hugging_face import read_config
from echelon.train.settings import differences, to_dict
from gpt.model.transformer import GPTConfig
from gpt.output.writers import require_installed
from gpt.settings import Settings
from gpt.text.corpus import Corpus, load_corpus
from gpt.training.loop import open_source
from gpt.training.settings import TrainingSettings

if TYPE_CHECKING:
    from echelon.dist.group import ProcessGroup

ROUNDED_FROM = 1024  # larger vocabularies are rounded up: multiples of 64 are faster
MULTIPLE = 64
AUTO = "auto"


@dataclass(frozen=True, kw_only=True)
class Job:
    """The model, the data and the settings of a run."""

    settings: Settings
    config: GPTConfig | ModelConfig
    training: TrainingSettings
    corpus: Corpus

    @cached_property
    def identity(self) -> dict[str, Any]:
        """The properties that must be equal in a checkpoint and the run that resumes it.

        They determine the weights' shapes and the order of the data. The number of ranks and the
        batch size may differ, because the position in the data does not depend on them.
        """
        return {**asdict(self.config), "seed": self.training.seed}

    @property
    def extras(self) -> dict[str, Any]:
        """The parts of a checkpoint that training does not change."""
        extras = {"identity": self.identity, "settings": to_dict(self.settings)}
        if isinstance(self.config, ModelConfig):  # required by `echelon.train.models export`
            extras["model_config"] = self.config.to_dict()
        return extras

    def require_same_run(self, path: str, saved: dict[str, Any]) -> None:
        """Check that this run can continue from a checkpoint.

        Args:
            path: the path of the checkpoint, for the message.
            saved: the plain values of the checkpoint.

        Raises:
            CheckpointError: the runs differ; the message lists every difference.
            ValueError: the checkpoint's position belongs to other data.
        """
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

    def changes_since(self, saved: dict[str, Any]) -> list[str]:
        """Return the training settings that differ from those in a checkpoint's plain values."""
        there, here = saved.get("settings", {}), to_dict(self.settings)
        sections = ("model", "data", "training", "machine")
        before, after = ({name: all_.get(name, {}) for name in sections} for all_ in (there, here))
        return differences(before, after)

    def require_same_data(self, world: ProcessGroup) -> None:
        """Check that all hosts read the same tokens. Collective.

        Raises:
            ValueError: the tokens differ; the message names the ranks that differ from rank 0.
        """
        found = world.all_gather_object(self.corpus.fingerprint)
        different = [rank for rank, numbers in enumerate(found) if numbers != found[0]]
        if different:
            ranks = ", ".join(map(str, different))
            raise ValueError(
                f"{self.corpus.name}: ranks {ranks} read different tokens from rank 0: "
                "give all hosts the same files"
            )


def prepare(settings: Settings) -> Job:
    """Read and check everything that the settings name, so that errors appear before the start.

    Raises:
        ValueError: the settings contradict each other or the text.
        OSError: a file cannot be read.
        CheckpointError: the checkpoint belongs to a different run.
        TokenShardsError: a folder does not contain token shards.
    """
    require_consistent(settings)
    make_config(settings)  # detects wrong sizes before a text is prepared
    corpus = load_corpus(settings.data.sources, vocabulary=settings.model.vocabulary)
    config = make_config(settings, corpus.vocabulary.size)
    training = training_settings(settings)
    if training.tp > 1 and config.heads % training.tp:
        raise ValueError(f"--tp {training.tp} does not divide {config.heads} heads")
    if training.sequence and config.context % training.tp:
        raise ValueError(f"--sequence: --tp {training.tp} does not divide {config.context} tokens")
    if training.pipeline > config.layers:
        raise ValueError(f"--pipeline {training.pipeline}: there are only {config.layers} layers")
    corpus.require_windows_of(config.context + 1)
    job = Job(settings=settings, config=config, training=training, corpus=corpus)
    if settings.checkpoint.resume not in (None, AUTO):
        job.require_same_run(settings.checkpoint.resume, peek(settings.checkpoint.resume))
    return job


def require_consistent(settings: Settings) -> None:
    """Check the settings that can be checked without reading files.

    Raises:
        ValueError: settings contradict each other, or a folder to write into does not exist.
    """
    checkpoint, training, machine = settings.checkpoint, settings.training, settings.machine
    for flag, value in (
        ("--checkpoint-every", checkpoint.every),
        ("--save-every-s", checkpoint.every_s),
        ("--resume auto", checkpoint.resume == AUTO),
    ):
        if value and not checkpoint.path:
            raise ValueError(f"{flag} needs --checkpoint FOLDER")
    for path in filter(None, (checkpoint.path, checkpoint.export_hf, settings.report.log)):
        if "://" not in path:  # an object store creates its folders itself
            require_folder_of(Path(path))
    if machine.microbatches and machine.microbatches > 1 and machine.pipeline == 1:
        raise ValueError("--microbatches needs --pipeline")
    if machine.sequence and machine.tp == 1:
        raise ValueError("--sequence needs --tp")
    if training.ema is not None and training.ema >= 1:
        raise ValueError(f"--ema {training.ema:g}: a decay is below 1")
    is_own = settings.model.kind == "gpt" and settings.model.init_from is None
    for flag, is_asked in (
        ("--mask-documents", settings.data.mask_documents),
        ("--pack-documents", settings.data.pack_documents),
        ("--tp", machine.tp > 1),
        ("--export-hf", checkpoint.export_hf),
    ):
        if is_asked and is_own:
            raise ValueError(f"{flag} needs --model gpt2 or llama")
    require_composed(settings)
    require_installed(settings.report)


def require_composed(settings: Settings) -> None:
    """Check that the requested kinds of parallelism can be combined.

    Raises:
        ValueError: two of them exclude each other.
    """
    training, machine = settings.training, settings.machine
    for one, other, is_asked in (
        (
            "--pipeline",
            "--accumulate: its micro-batches do that",
            machine.pipeline > 1 and training.accumulate > 1,
        ),
        (
            "--pipeline",
            "--checkpoint-activations",
            machine.pipeline > 1 and machine.checkpoint_activations != "none",
        ),
        ("--chunked-loss", "--pipeline", training.chunked_loss and machine.pipeline > 1),
        ("--chunked-loss", "--tp", training.chunked_loss and machine.tp > 1),
    ):
        if is_asked:
            raise ValueError(f"{one} does not go together with {other}")


def require_folder_of(path: Path) -> None:
    """Check that the folder of `path` exists, to avoid an error after hours of training.

    Raises:
        ValueError: the folder does not exist.
    """
    if not path.parent.is_dir():
        raise ValueError(f"cannot write {path}: no such folder")


def make_config(settings: Settings, known: int = 1) -> GPTConfig | ModelConfig:
    """Return the model's sizes.

    Args:
        known: the number of tokens in the data's vocabulary.

    Raises:
        ValueError: the sizes are invalid.
    """
    model = settings.model
    if model.init_from is not None:
        return read_sizes(model.init_from, model.context, known)
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


def read_sizes(folder: str, context: int, known: int) -> ModelConfig:
    """Return the sizes of a Hugging Face model, with a shorter context if its weights allow one.

    Raises:
        ValueError: the data has a different vocabulary from the model.
        CheckpointError: the folder contains no readable model.
    """
    config = read_config(folder)
    if config.vocabulary < known:
        raise ValueError(f"{folder} knows {config.vocabulary} tokens, and the data has {known}")
    if config.positions == "rotary":
        config = replace(config, context=min(context, config.context))
    return config


def training_settings(settings: Settings) -> TrainingSettings:
    """Return the trainer's settings.

    Raises:
        ValueError: the mode of activation checkpointing is unknown.
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
        tp=machine.tp,
        sequence=machine.sequence,
        chunked_loss=training.chunked_loss,
        ema=training.ema,
        init_from=settings.model.init_from,
        compile=machine.compile,
        pipeline=machine.pipeline,
        microbatches=microbatches,
        activations=mode,
        activations_every=every,
        mask_documents=settings.data.mask_documents or settings.data.pack_documents,
        pack_documents=settings.data.pack_documents,
        workers=settings.data.workers,
    )


def read_activations(text: str) -> tuple[str, int]:
    """Parse `full`, `every=N`, `selective` or `none` into a mode and an interval.

    Raises:
        ValueError: the text has none of these forms.
    """
    if text in ("none", "full", "selective"):
        return text, 1
    name, _, number = text.partition("=")
    if name == "every" and number.isdecimal() and int(number) > 0:
        return "full", int(number)
    raise ValueError(f"--checkpoint-activations is {text!r}, not full, every=N, selective or none")


def unfit(training: TrainingSettings, world_size: int) -> str | None:
    """Return why these settings do not fit the number of ranks, or None if they do."""
    parts = training.num_parts
    for flag, size in (("--pipeline", training.pipeline), ("--tp", training.tp)):
        if world_size % size:
            return f"{flag} {size} does not divide {world_size} ranks"
    if world_size % (training.pipeline * training.tp):
        return (
            f"--pipeline {training.pipeline} x --tp {training.tp} do not divide {world_size} ranks"
        )
    num_shares = world_size // training.pipeline // training.tp
    if training.batch < num_shares:
        return f"--batch {training.batch} leaves some of {world_size} ranks without data"
    if training.batch // num_shares < parts:
        kind = "micro-batches" if training.pipeline > 1 else "passes"
        return (
            f"--batch {training.batch} in {num_shares} shares cannot be split into {parts} {kind}"
        )
    return None
