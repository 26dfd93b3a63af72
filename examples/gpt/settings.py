"""All settings of a run in one typed configuration: defaults < preset < file < flags.

`--config run.toml` reads a file, and `--set training.lr=3e-4` overrides one value. The resulting
configuration is written next to the log and into each checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal


def whole(default: int, least: int = 1) -> Any:
    """Return a field for integers of at least `least`."""
    return field(default=default, metadata={"least": least})


def maybe(least: int = 1) -> Any:
    """Return an optional field for integers of at least `least`."""
    return field(default=None, metadata={"least": least})


def at_least_zero(default: float) -> Any:
    """Return a field for nonnegative numbers."""
    return field(default=default, metadata={"least": 0})


def positive(default: float | None) -> Any:
    """Return a field for positive numbers."""
    return field(default=default, metadata={"above": 0})


@dataclass(frozen=True, kw_only=True)
class Model:
    """The settings of the model."""

    kind: Literal["gpt", "gpt2", "llama"] = "gpt"  # the example's own, or of echelon.train.models
    layers: int = whole(4)
    width: int = whole(128)
    heads: int = whole(4)
    kv_heads: int | None = maybe()  # of a Llama: heads of keys and values
    context: int = whole(128)
    vocabulary: int | None = maybe()
    init_from: str | None = None  # a Hugging Face folder: its sizes and its weights


@dataclass(frozen=True, kw_only=True)
class Data:
    """The settings of the training data."""

    sources: tuple[str, ...] = ()  # PATH or PATH:WEIGHT
    workers: int = whole(1)  # threads that read ahead
    mask_documents: bool = False  # no attention and no loss from one document to the next
    pack_documents: bool = False  # samples hold whole documents, which are masked


@dataclass(frozen=True, kw_only=True)
class Training:
    """The settings of the training itself."""

    steps: int = whole(1200)
    batch: int = whole(16)
    accumulate: int = whole(1)
    lr: float = positive(3e-3)
    optimizer: Literal["adamw", "muon"] = "adamw"
    schedule: Literal["cosine", "wsd", "constant"] = "cosine"
    warmup: int = whole(50, least=0)
    clip: float = positive(1.0)
    chunked_loss: bool = False  # never the logits of all tokens at once
    ema: float | None = positive(None)  # decay of an average of the weights, below 1
    max_skipped: int = whole(10)  # steps in a row whose gradients were not finite
    seed: int = whole(0, least=0)


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The settings of devices, and of parallelism over the ranks."""

    shard: bool = False
    tp: int = whole(1)
    sequence: bool = False  # also what is outside of attention and feed-forward, by positions
    pipeline: int = whole(1)
    microbatches: int | None = maybe()
    mixed_precision: Literal["no", "bf16", "fp16"] = "no"
    checkpoint_activations: str = "none"  # full, every=N or selective
    compile: bool = False
    device: Literal["auto", "cpu", "cuda"] = "auto"
    backend: str | None = None
    peak_tflops: float | None = positive(None)


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """When to save checkpoints, which ones to keep, and which one to resume."""

    path: str | None = None  # a folder that gets one for each step
    every: int | None = maybe()  # steps
    every_s: float | None = positive(None)
    keep: int = whole(2)
    keep_every: int | None = maybe()  # also keeps those whose step is a multiple of it
    patience_s: float = at_least_zero(60.0)  # so long, saves are skipped while one is written
    best: bool = False  # also keeps the one with the lowest validation loss
    resume: str | None = None  # a checkpoint, or "auto"
    export_hf: str | None = None  # a folder for the trained model, as transformers reads it


@dataclass(frozen=True, kw_only=True)
class Report:
    """The settings of the reports."""

    log: str | None = None
    tensorboard: str | None = None  # a folder for event files
    wandb: str | None = None  # a project of Weights & Biases, whose files stay here: offline
    eval_every: int = whole(400)
    eval_windows: int = whole(512)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The whole configuration of a run."""

    model: Model = field(default_factory=Model)
    data: Data = field(default_factory=Data)
    training: Training = field(default_factory=Training)
    machine: Machine = field(default_factory=Machine)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    report: Report = field(default_factory=Report)
