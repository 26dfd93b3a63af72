"""`python -m echelon.dist.checkpoint PATH`: what a checkpoint holds; verify it; export it."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from echelon.dist.checkpoint.disk.source import Version
from echelon.dist.checkpoint.export import export
from echelon.dist.checkpoint.state.entries import MODULE, OPTIMIZER, RANDOM
from echelon.dist.checkpoint.state.plain import unpack
from echelon.errors import CheckpointError

_SHOWN_CHARS = 100


def main() -> int:
    """Run the command; return its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m echelon.dist.checkpoint", description=__doc__.partition(": ")[2]
    )
    parser.add_argument("path", type=Path, help="a checkpoint, or one version in it")
    parser.add_argument("--verify", action="store_true", help="read every byte, check it")
    parser.add_argument("--export", type=Path, metavar="FILE", help=".safetensors, or torch's .pt")
    parser.add_argument("--key", help="the entry to export")
    options = parser.parse_args()
    try:
        source = Version(options.path)
        try:
            print("\n".join(describe(source)))
            if options.verify:
                print(f"verified: {source.verify():,} bytes are as they were saved")
        finally:
            source.close()
        if options.export:
            export(options.path, options.export, options.key)
            print(f"exported to {options.export}")
    except (CheckpointError, ValueError, OSError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1
    return 0


def describe(source: Version) -> list[str]:
    """Return a line for each entry."""
    manifest = source.manifest
    num_bytes = sum(file.num_bytes for file in manifest.files.values())
    lines = [f"{source.path}: {num_bytes:,} bytes of tensors, saved by {manifest.world_size} ranks"]
    for path, kind in manifest.kinds.items():
        tensors = [t for name, t in manifest.tensors.items() if f"{name}/".startswith(f"{path}/")]
        numel = sum(tensor.numel for tensor in tensors)
        if kind in (MODULE, OPTIMIZER):
            lines.append(f"  {path}: {kind}, {len(tensors)} tensors, {numel:,} elements")
        elif kind == RANDOM:
            lines.append(f"  {path}: random states")
        else:
            lines.append(f"  {path}: {_short(unpack(manifest.values[path]))}")
    return lines


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}..."


if __name__ == "__main__":
    sys.exit(main())
