"""Convert models between checkpoints and the folders that `transformers` loads.

    python -m echelon.train.models show FOLDER
    python -m echelon.train.models export CHECKPOINT FOLDER [--key NAME] [--like FOLDER] [...]
    python -m echelon.train.models import FOLDER CHECKPOINT [--key NAME]

`import` stores the model's config in the checkpoint, as the plain value `model_config`. For
checkpoints without this value, pass `--like` or `--config`. The exit code is 0 on success, 1 if a
file cannot be read or written, and 2 if an argument is invalid.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from echelon.dist.checkpoint import peek, save
from echelon.dist.checkpoint.disk.tensor_bytes import dtype_named
from echelon.errors import CheckpointError
from echelon.train.models.config import ModelConfig
from echelon.train.models.hugging_face.config_file import read_config, token_settings
from echelon.train.models.hugging_face.reading import load_pretrained
from echelon.train.models.hugging_face.writing import MAX_PIECE_BYTES, convert

CONFIG_KEY = "model_config"
_DTYPES = ("float32", "bfloat16", "float16")


def main(arguments: list[str] | None = None) -> int:
    """Run the command, and return its exit code."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        if options.command == "show":
            print("\n".join(describe(read_config(options.folder, ignore=options.ignore))))
        elif options.command == "export":
            _export(options)
            print(f"wrote {options.folder}")
        else:
            _import(options)
            print(f"saved {options.checkpoint}")
    except (CheckpointError, ValueError, TypeError, OSError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1
    return 0


def describe(config: ModelConfig) -> list[str]:
    """Return one line per setting of a config, and a line with the number of parameters."""
    lines = [f"{name}: {value}" for name, value in config.to_dict().items()]
    return [*lines, f"parameters: {config.num_parameters():,}"]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m echelon.train.models", description=__doc__.partition("\n")[0]
    )
    commands = parser.add_subparsers(dest="command", required=True)
    show = commands.add_parser("show", help="show the model that a config.json describes")
    export = commands.add_parser(
        "export", help="write a checkpoint's model as a transformers folder"
    )
    export.add_argument(
        "checkpoint", type=Path, help="the checkpoint's folder, or one version in it"
    )
    load = commands.add_parser("import", help="write a transformers folder as a checkpoint")
    for command in (show, export, load):
        command.add_argument(
            "folder", type=Path, help="a folder with config.json and safetensors files"
        )
        command.add_argument(
            "--ignore", metavar="KEY", action="append", default=[],
            help="an unknown key of config.json that has no effect on the model",
        )  # fmt: skip
    load.add_argument("checkpoint", type=Path, help="the checkpoint's folder")
    load.add_argument(
        "--key", default="model", help="the module's entry in the checkpoint (default: model)"
    )
    load.add_argument("--dtype", choices=_DTYPES, help="dtype of the weights (default: float32)")
    export.add_argument("--key", help="the module's entry, if the checkpoint has several modules")
    export.add_argument("--dtype", choices=_DTYPES, help="dtype to store (default: as saved)")
    export.add_argument("--max-piece-bytes", type=int, default=MAX_PIECE_BYTES)
    origin = export.add_mutually_exclusive_group()
    origin.add_argument(
        "--like", type=Path, metavar="FOLDER",
        help="a transformers folder from which to take the config and token IDs",
    )  # fmt: skip
    origin.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="a JSON file with the output of config.to_dict()",
    )
    return parser


def _export(options: argparse.Namespace) -> None:
    extra = {} if options.like is None else token_settings(options.like)
    convert(
        options.checkpoint,
        options.folder,
        _find_config(options),
        key=options.key,
        dtype=None if options.dtype is None else dtype_named(options.dtype),
        max_piece_bytes=options.max_piece_bytes,
        extra=extra,
    )


def _find_config(options: argparse.Namespace) -> ModelConfig:
    """Return the config that the options select, or else the config in the checkpoint.

    Raises:
        ValueError: neither the options nor the checkpoint gives a config.
    """
    if options.like is not None:
        return read_config(options.like, ignore=options.ignore)
    if options.config is not None:
        content: Any = json.loads(options.config.read_bytes())
        source = options.config
    else:
        content = peek(options.checkpoint).get(CONFIG_KEY)
        source = options.checkpoint
    if not isinstance(content, Mapping):
        if options.config is not None:
            raise ValueError(f"{source}: the file does not contain a JSON object")
        raise ValueError(
            f"{source}: the checkpoint has no {CONFIG_KEY}; pass --like FOLDER or --config FILE"
        )
    return ModelConfig.from_dict(content)


def _import(options: argparse.Namespace) -> None:
    dtype = None if options.dtype is None else dtype_named(options.dtype)
    model = load_pretrained(options.folder, dtype=dtype, ignore=options.ignore)
    save(options.checkpoint, {options.key: model, CONFIG_KEY: model.config.to_dict()})


if __name__ == "__main__":
    sys.exit(main())
