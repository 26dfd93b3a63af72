"""What a node sees of its ranks."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

from echelon.launcher.node.sighting import Sighting
from echelon.recorder.format.schema import Identity
from echelon.recorder.write.recorder import Recorder
from echelon.recorder.write.ring import Ring


def test_a_rank_that_has_closed_its_ring_is_seen_from_outside(tmp_path: Path) -> None:
    """Its heartbeat ends with its program: destructors that compute for long are no stall."""
    identity = Identity(rank=0, pid=os.getpid())
    ring = Ring(tmp_path / "ring", identity, num_operations=16, num_spans=16)
    recorder = Recorder(ring)
    worker = SimpleNamespace(alive=True, torch=None, rank=0, folder=tmp_path, pid=os.getpid())
    start = SimpleNamespace(attempt=0, master_port=1, stall_timeout_ms=60_000)
    sighting = Sighting(start, [worker], lambda _: 0)
    first = sighting.look()
    assert first is not None
    assert first.folded
    assert first.ranks == []
    recorder.close()
    second = sighting.look()
    sighting.close()
    assert second is not None
    assert second.folded == []
    assert [(row[0], row[5]) for row in second.ranks] == [(0, 0)], "rank 0, without a ring"
