"""Test the disk on which a job stores its files, by writing, flushing and reading back a file."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time

from echelon.launcher.doctor.probes.finding import STORAGE, Finding, State

_SIZE = 1 << 20


def probe_storage(folder: str) -> Finding:
    """Write, fsync, read back and remove a 1 MiB file in a folder. Blocks if the disk hangs."""
    name = ""
    try:
        began_s = time.perf_counter()
        handle, name = tempfile.mkstemp(prefix=".echelon-probe-", dir=folder)
        with os.fdopen(handle, "w+b") as file:
            data = os.urandom(_SIZE)
            file.write(data)
            file.flush()
            written_s = time.perf_counter()
            os.fsync(file.fileno())
            synced_s = time.perf_counter()
            file.seek(0)
            is_equal = file.read() == data
    except OSError as err:
        why = err.strerror or str(err)
        return Finding(probe=STORAGE, state=State.BROKEN, text=f"cannot write in {folder}: {why}")
    finally:
        if name:
            with contextlib.suppress(OSError):
                os.unlink(name)  # noqa: PTH108 -- of a name that mkstemp gave
    if not is_equal:
        text = f"{folder} returns different bytes than were written"
        return Finding(probe=STORAGE, state=State.BROKEN, text=text)
    figures = {"write_s": written_s - began_s, "fsync_s": synced_s - written_s}
    text = (
        f"1 MiB in {folder}: written in {figures['write_s'] * 1e3:.1f} ms, "
        f"fsync {figures['fsync_s'] * 1e3:.1f} ms"
    )
    return Finding(probe=STORAGE, state=State.WHOLE, text=text, figures=figures)
