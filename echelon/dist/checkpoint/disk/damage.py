"""Define DamagedError, which reports damaged data on disk."""

from __future__ import annotations

from echelon.errors import CheckpointError


class DamagedError(CheckpointError):
    """A file of a committed version is missing, truncated or altered.

    An older version may still be usable.
    """
