"""The command line: flags for frequently changed settings, and `--set` for all others.

A flag's destination is the dotted name of a setting, so a new setting needs no flag.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from echelon.train.settings import build, merged, override, parse_assignment, read_toml
from gpt.arguments import OneLineParser, positive_number, whole_number
from gpt.model.presets import PRESETS
from gpt.settings import Settings

NOT_SETTINGS = ("preset", "config", "set")


def build_parser(description: str) -> argparse.ArgumentParser:
    """Return the argument parser."""
    parser = OneLineParser(description=description, argument_default=argparse.SUPPRESS)
    add = parser.add_argument
    add("--preset", choices=PRESETS, default="small", help="defaults (default: small)")
    add("--config", metavar="FILE.toml", default=None, help="settings, over the preset's")
    add(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="one setting, over all others: training.lr=3e-4",
    )
    add_model(parser.add_argument_group("model"))
    add_training(parser.add_argument_group("training"))
    add_machine(parser.add_argument_group("machine"))
    add_files(parser.add_argument_group("files"))
    return parser


def add_model(group: argparse._ArgumentGroup) -> None:
    """Add the flags of the model."""
    at_least_1 = whole_number(1)
    group.add_argument(
        "--model",
        dest="model.kind",
        choices=("gpt", "gpt2", "llama"),
        help="the example's own (default), or one of echelon.train.models",
    )
    for name in ("layers", "width", "heads"):
        group.add_argument(f"--{name}", dest=f"model.{name}", type=at_least_1, metavar="N")
    group.add_argument(
        "--context", dest="model.context", type=at_least_1, metavar="N", help="tokens it looks back"
    )
    group.add_argument(
        "--vocabulary",
        dest="model.vocabulary",
        type=at_least_1,
        metavar="N",
        help="vocabulary of a text: 256: bytes; fewer: characters; more: words",
    )
    group.add_argument(
        "--init-from",
        dest="model.init_from",
        metavar="FOLDER",
        help="of a Hugging Face model, GPT-2 or a Llama: its sizes and weights",
    )


def add_training(group: argparse._ArgumentGroup) -> None:
    """Add the flags of training."""
    at_least_0, at_least_1 = whole_number(0), whole_number(1)
    numbers = {
        "steps": (at_least_1, "of the whole run"),
        "batch": (at_least_1, "sequences, over all ranks"),
        "accumulate": (at_least_1, "forward and backward passes per step (default: 1)"),
        "lr": (positive_number, "highest learning rate"),
        "warmup": (at_least_0, "steps to the highest rate"),
        "clip": (positive_number, "largest gradient norm (default: 1)"),
        "seed": (at_least_0, "of the weights and the order of the data (default: 0)"),
    }
    for name, (kind, text) in numbers.items():
        group.add_argument(f"--{name}", dest=f"training.{name}", type=kind, metavar="N", help=text)
    group.add_argument(
        "--optimizer",
        dest="training.optimizer",
        choices=("adamw", "muon"),
        help="muon: of hidden matrices, AdamW for the rest (default: adamw)",
    )
    group.add_argument(
        "--schedule",
        dest="training.schedule",
        choices=("cosine", "wsd", "constant"),
        help="of the learning rate; wsd: warm-up, stable, decay (default: cosine)",
    )
    group.add_argument(
        "--ema",
        dest="training.ema",
        type=positive_number,
        metavar="DECAY",
        help="validate and export an average of the weights",
    )
    group.add_argument(
        "--chunked-loss",
        dest="training.chunked_loss",
        action="store_true",
        help="never hold the logits of all tokens at once",
    )


def add_machine(group: argparse._ArgumentGroup) -> None:
    """Add the flags for the devices, dtypes and parallelism of the ranks."""
    at_least_1 = whole_number(1)
    add = group.add_argument
    add("--shard", dest="machine.shard", action="store_true", help="divide the model among ranks")
    add(
        "--tp",
        dest="machine.tp",
        type=at_least_1,
        metavar="N",
        help="divide each layer among N ranks, which divides heads and the number of ranks",
    )
    add(
        "--sequence",
        dest="machine.sequence",
        action="store_true",
        help="with --tp: divide norms and residuals too, by the positions of each sequence",
    )
    add(
        "--pipeline",
        dest="machine.pipeline",
        type=at_least_1,
        metavar="STAGES",
        help="divide the model into consecutive stages; the number of ranks divides by it",
    )
    add(
        "--microbatches",
        dest="machine.microbatches",
        type=at_least_1,
        metavar="N",
        help="of a pipeline (default: twice the stages)",
    )
    add(
        "--mixed-precision",
        dest="machine.mixed_precision",
        choices=("no", "bf16", "fp16"),
        help="what to compute in; weights and sums stay float32, and fp16 scales the loss",
    )
    add(
        "--checkpoint-activations",
        dest="machine.checkpoint_activations",
        metavar="full|every=N|selective",
        help="compute activations again in backward, instead of keeping them",
    )
    add(
        "--device",
        dest="machine.device",
        choices=("auto", "cpu", "cuda"),
        help="where to compute (default: the GPU of the local rank, if there is one)",
    )
    add("--compile", dest="machine.compile", action="store_true", help="blocks, by torch.compile")
    add(
        "--peak-tflops",
        dest="machine.peak_tflops",
        type=positive_number,
        metavar="T",
        help="of one rank's processor; what MFU is a share of (default: measured)",
    )
    add("--backend", dest="machine.backend", help="of the collectives (default: by device, hosts)")


def add_files(group: argparse._ArgumentGroup) -> None:
    """Add the flags for input and output files."""
    at_least_1 = whole_number(1)
    add = group.add_argument
    add(
        "--data",
        dest="data.sources",
        nargs="+",
        metavar="PATH[:WEIGHT]",
        help="text files, or folders that `echelon prepare` made (default: Python's own source)",
    )
    add(
        "--mask-documents",
        dest="data.mask_documents",
        action="store_true",
        help="no attention and no loss from one document to the next",
    )
    add(
        "--pack-documents",
        dest="data.pack_documents",
        action="store_true",
        help="lay whole documents into each sample, masked from each other",
    )
    add(
        "--checkpoint",
        dest="checkpoint.path",
        metavar="FOLDER",
        help="where to save, at the end at least: a folder that gets one for each step",
    )
    add("--checkpoint-every", dest="checkpoint.every", type=at_least_1, metavar="STEPS")
    add("--save-every-s", dest="checkpoint.every_s", type=positive_number, metavar="SECONDS")
    add(
        "--keep",
        dest="checkpoint.keep",
        type=at_least_1,
        metavar="N",
        help="checkpoints kept in a folder (default: 2)",
    )
    add(
        "--resume",
        dest="checkpoint.resume",
        metavar="FOLDER",
        help="checkpoint to continue from; auto: the newest of --checkpoint, if there is one",
    )
    add(
        "--export-hf",
        dest="checkpoint.export_hf",
        metavar="FOLDER",
        help="where to write the trained model, as Hugging Face's transformers reads it",
    )
    add("--log", dest="report.log", metavar="FILE", help="one JSON line per step")
    add(
        "--tensorboard",
        dest="report.tensorboard",
        metavar="FOLDER",
        help="the same figures for TensorBoard, if it is installed",
    )
    add(
        "--wandb",
        dest="report.wandb",
        metavar="PROJECT",
        help="the same for Weights & Biases, if it is installed: files to upload later",
    )
    add("--eval-every", dest="report.eval_every", type=at_least_1, metavar="STEPS")
    add(
        "--eval-windows",
        dest="report.eval_windows",
        type=at_least_1,
        metavar="N",
        help="held-out windows",
    )


def read_settings(
    parser: argparse.ArgumentParser, arguments: Sequence[str] | None = None
) -> Settings:
    """Read the command line and the config file that it names.

    Raises:
        ValueError: a setting does not exist, or a value is invalid.
        OSError: the file cannot be read.
    """
    options = vars(parser.parse_args(arguments))
    values: dict[str, Any] = merged({}, PRESETS[options["preset"]])
    if options["config"] is not None:
        values = merged(values, read_toml(options["config"]))
    for name, value in options.items():
        if name not in NOT_SETTINGS:
            override(values, name, value)
    for text in options["set"]:
        override(values, *parse_assignment(text))
    return build(Settings, values)
