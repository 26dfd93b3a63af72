"""Define DamagedError, which reports that data on disk differs from what was written."""

from __future__ import annotations

from echelon.errors import CheckpointError


class DamagedError(CheckpointError):
    """A file of a committed version is missing, truncated or altered.

    An older version may still be usable.
    """
