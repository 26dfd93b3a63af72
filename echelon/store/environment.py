"""Read a store client's settings from the environment of a worker.

| variable | meaning |
|---|---|
| MASTER_ADDR, MASTER_PORT | the job's store |
| ECHELON_JOB_FILE | the launcher's job file (mode 0600), which contains the store's secret |
| ECHELON_RANK_DIR | the folder of this worker's black box |
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path


def job_secret(host: str, port: int) -> bytes | None:
    """Return the secret of the job's store, or None for any other store.

    Raises:
        ValueError: the launcher's job file cannot be read.
    """
    path = os.environ.get("ECHELON_JOB_FILE")
    if not path:
        return None
    if str(port) != os.environ.get("MASTER_PORT"):
        return None
    if not _is_same_host(host, os.environ.get("MASTER_ADDR", "")):
        return None
    try:
        job = json.loads(Path(path).read_text())
    except (OSError, ValueError) as err:
        raise ValueError(f"cannot read ECHELON_JOB_FILE={path}: {err}") from err
    secret = job.get("secret") if isinstance(job, dict) else None
    return secret.encode() if isinstance(secret, str) else None


def _is_same_host(one: str, other: str) -> bool:
    """Return whether two host names or addresses are equal or resolve to a common address."""
    if one == other:
        return True
    try:
        return not _addresses(one).isdisjoint(_addresses(other))
    except OSError:
        return False


def _addresses(host: str) -> set[str]:
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return {str(entry[4][0]) for entry in found}


def job_observer() -> Callable[[str, str], AbstractContextManager[object]] | None:
    """Return an observer that records waits for the store in the black box; None outside a job."""
    if "ECHELON_RANK_DIR" not in os.environ:
        return None
    from echelon.recorder import span  # loaded only where there is a box to write to

    return lambda operation, key: span("store", f"{operation} {key}")
