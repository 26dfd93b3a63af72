"""Show, verify and export checkpoints from the command line.

    python -m echelon.dist.checkpoint show FOLDER
    python -m echelon.dist.checkpoint verify FOLDER
    python -m echelon.dist.checkpoint export FOLDER FILE [--key NAME]

The exit code is 0 on success, 1 if a version is damaged or cannot be read, and 2 for an invalid
command line.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from echelon.dist.checkpoint.disk.folder import COMMIT, candidates, marked
from echelon.dist.checkpoint.disk.manifest import Manifest
from echelon.dist.checkpoint.disk.source import Version
from echelon.dist.checkpoint.exporting import export
from echelon.dist.checkpoint.state.entries import MODULE, OPTIMIZER, RANDOM
from echelon.dist.checkpoint.state.plain import unpack
from echelon.errors import CheckpointError

_SHOWN_CHARS = 100


def main(arguments: list[str] | None = None) -> int:
    """Run the command; return its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m echelon.dist.checkpoint", description=__doc__.partition("\n")[0]
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in (
        ("show", "show the contents and versions of a checkpoint"),
        ("verify", "read every byte of every version"),
        ("export", "write one file that other programs can read"),
    ):
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("path", type=Path, metavar="FOLDER", help="or one version of it")
    command.add_argument("file", type=Path, metavar="FILE", help=".safetensors, or torch's .pt")
    command.add_argument("--key", help="the entry to export")
    options = parser.parse_args(arguments)
    try:
        if options.command == "show":
            return show(options.path)
        if options.command == "verify":
            return verify(options.path)
        export(options.path, options.file, options.key)
        print(f"exported to {options.file}")
    except (CheckpointError, ValueError, OSError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1
    return 0


def show(path: Path) -> int:
    """Print the contents of the newest version and the list of versions."""
    source = Version(path)
    try:
        print("\n".join(describe(source)))
    finally:
        source.close()
    others = [version.name for version in _all_versions(path) if version != source.path]
    if others:
        print(f"older versions: {', '.join(others)}")
    return 0


def verify(path: Path) -> int:
    """Read every version, oldest first, and print one line per version.

    Returns:
        The exit code: 1 if any version is damaged, otherwise 0.
    """
    code = 0
    for version in _all_versions(path):
        try:
            source = Version(version)
            try:
                print(f"{version}: {source.verify():,} bytes are intact")
            finally:
                source.close()
        except CheckpointError as error:
            print(f"{version}: DAMAGED: {error}", file=sys.stderr)
            code = 1
    return code


def _all_versions(path: Path) -> list[Path]:
    candidates(path)  # raises if there is none
    return [path] if (path / COMMIT).exists() else list(marked(path))


def describe(source: Version) -> list[str]:
    """Return the lines that describe a checkpoint: one per entry and one per module tensor."""
    manifest = source.manifest
    num_bytes = sum(file.num_bytes for file in manifest.files.values())
    lines = [f"{source.path}: {num_bytes:,} bytes of tensors, saved by {manifest.world_size} ranks"]
    for path, kind in manifest.kinds.items():
        tensors = [t for name, t in manifest.tensors.items() if f"{name}/".startswith(f"{path}/")]
        numel = sum(tensor.numel for tensor in tensors)
        if kind in (MODULE, OPTIMIZER):
            lines.append(f"  {path}: {kind}, {len(tensors)} tensors, {numel:,} elements")
            lines += _names(manifest, path) if kind == MODULE else []
        elif kind == RANDOM:
            lines.append(f"  {path}: random states")
        elif path not in manifest.values:
            lines.append(f"  {path}: one per rank")
        else:
            lines.append(f"  {path}: {_short(unpack(manifest.values[path]))}")
    return lines


def _names(manifest: Manifest, path: str) -> list[str]:
    """Return one line for each tensor of a module, including tied tensors."""
    lines = []
    for name, tensor in sorted(manifest.tensors.items()):
        if name.startswith(f"{path}/"):
            shape = ", ".join(map(str, tensor.shape))
            lines.append(f"    {name.removeprefix(f'{path}/')}: {tensor.dtype}[{shape}]")
    for name, target in sorted(manifest.aliases.items()):
        if name.startswith(f"{path}/"):
            ends = (one.removeprefix(f"{path}/") for one in (name, target))
            lines.append("    {}: tied to {}".format(*ends))
    return lines


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}..."


if __name__ == "__main__":
    sys.exit(main())
