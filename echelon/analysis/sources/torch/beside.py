"""Read dumps of torch's own recorder that are stored alongside echelon's black boxes.

A rank that runs an unmodified torch program has no ring. Its operations are then read from torch's
dump. If a rank has a ring, its dump from torch is ignored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from echelon.analysis.sources.builder import EvidenceBuilder
from echelon.analysis.sources.collector import collector_off
from echelon.analysis.sources.torch.folder import TorchLoader


def add_torch(builder: EvidenceBuilder, files: Sequence[tuple[int, Path]], world_size: int) -> None:
    """Add the operations in torch's dumps to the evidence, for ranks that have no ring.

    An unreadable dump only causes a warning.
    """
    loader = TorchLoader(builder.tables)
    with collector_off():
        for rank, path in files:
            facts = builder.ranks.get(rank)
            if facts is not None and not facts.has_ring:
                loader.read(rank, path)
    builder.warnings += loader.warnings
    if not loader.files:
        return
    groups = loader.settle(world_size)
    numbers = np.array([builder.group(group) for group in groups.groups], np.int32)
    builder.vague_groups |= {int(numbers[vague]) for vague in groups.vague}
    builder.foreign = "torch"
    # torch stamps the wall clock. One shift for all ranks keeps them as comparable as they are.
    identity = builder.ranks[min(loader.files)].identity
    shift = identity.mono_ns - identity.wall_ns
    for rank, read in loader.files.items():
        facts = builder.ranks[rank]
        rows = read.rows
        if len(rows):
            rows["group"] = numbers[rows["group"]]
            for name in ("created_ns", "started_ns", "ended_ns"):
                rows[name] += np.where(rows[name] > 0, shift, 0)
        entered = {int(numbers[g]): n for g, n in groups.entered.get(rank, {}).items()}
        completed = {int(numbers[g]): n for g, n in groups.completed.get(rank, {}).items()}
        builder.ranks[rank] = replace(
            facts,
            rows=rows,
            seen_ns=facts.identity.wall_ns + shift,
            entered=entered,
            completed=completed,
        )
