"""The C core that writes operations; without a compiler at installation there is none."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from echelon.recorder import sites
from echelon.recorder.operations import OperationWriter, Signatures
from echelon.recorder.ring import Ring
from echelon.recorder.schema import NUM_KEPT

try:
    _native: Any = importlib.import_module("echelon.recorder._native")
except ImportError:
    _native = None


def available() -> bool:
    """Whether the C core was built."""
    return _native is not None


def make_writer(
    ring: Ring, known_sites: sites.Sites, now: Callable[[], int] | None = None
) -> OperationWriter:
    """Return a writer in C. It holds the ring's memory until the ring is closed."""
    signatures = Signatures(ring)
    writer = _native.Writer(
        memory=ring.map,
        operations_offset=ring.layout.operations_offset,
        num_operations=ring.num_operations,
        kept_offset=ring.layout.kept_offset,
        num_kept=NUM_KEPT,
        recent_offset=ring.layout.recent_offset,
        add_signature=signatures.add,
        is_user_code=sites.is_user_code,
        add_site=known_sites.add,
        find_site=known_sites.find,
        now=now,
    )
    ring.when_closed(writer.close)
    operations: OperationWriter = writer
    return operations
