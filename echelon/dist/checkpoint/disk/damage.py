"""Define DamagedError, the error for a damaged or missing checkpoint version."""

from __future__ import annotations

from echelon.errors import CheckpointError


class DamagedError(CheckpointError):
    """A file of a committed checkpoint version is missing, truncated or altered.

    An older version might still be loadable.
    """
