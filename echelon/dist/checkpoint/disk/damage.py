"""DamagedError: what is on the disk is not what was written."""

from __future__ import annotations

from echelon.errors import CheckpointError


class DamagedError(CheckpointError):
    """A file of a committed version is missing, cut short or altered; an older version may do."""
