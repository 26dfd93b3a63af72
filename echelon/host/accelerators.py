"""Count this host's accelerators and find their NUMA nodes.

Everything is read from /dev, /proc and /sys, because the launcher does not load torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

_INTEL = "0x8086"
_BUS = re.compile(r"Bus Location:\s*([0-9a-fA-F:.]+)")


def num_nvidia(environ: Mapping[str, str], dev: Path = Path("/dev")) -> int:
    """Return the number of NVIDIA GPUs visible to a program with this environment."""
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    there = len(list(dev.glob("nvidia[0-9]*")))
    return there if visible is None else min(there, len(visible_devices(visible)))


def num_intel(drm: Path = Path("/sys/class/drm")) -> int:
    """Return the number of Intel GPUs on this host."""
    vendors = [path / "device/vendor" for path in drm.glob("renderD*")]
    return sum(path.is_file() and path.read_text().strip() == _INTEL for path in vendors)


def visible_devices(text: str) -> list[str]:
    """Parse a CUDA_VISIBLE_DEVICES value; an entry of -1 hides all entries that follow it."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    return names[: names.index("-1")] if "-1" in names else names


def visible_to(local_rank: int, environ: Mapping[str, str]) -> str:
    """Return the CUDA_VISIBLE_DEVICES value that makes only a local rank's own GPU visible.

    Raises:
        ValueError: the launcher's own CUDA_VISIBLE_DEVICES lists too few GPUs for this rank.
    """
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return str(local_rank)
    names = visible_devices(visible)
    if local_rank >= len(names):
        raise ValueError(
            f"--virtual-local-rank: CUDA_VISIBLE_DEVICES={visible} has no GPU for local rank "
            f"{local_rank}"
        )
    return names[local_rank]


def numa_nodes_of_gpus(
    environ: Mapping[str, str], proc: Path = Path("/proc"), sys: Path = Path("/sys")
) -> list[int]:
    """Return the NUMA node of each visible NVIDIA GPU.

    GPUs are numbered in the order of their PCI addresses. The list is empty if the host has no
    GPUs, or if CUDA_VISIBLE_DEVICES does not identify GPUs by number.
    """
    nodes = []
    for folder in sorted((proc / "driver/nvidia/gpus").glob("*")):
        match = _BUS.search(_text(folder / "information"))
        address = (match[1] if match else folder.name).lower()
        # A machine with a single node often reports -1.
        nodes.append(max(0, int(_text(sys / "bus/pci/devices" / address / "numa_node") or "0")))
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return nodes
    try:
        return [nodes[int(name)] for name in visible_devices(visible)]
    except (ValueError, IndexError):
        return []


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
