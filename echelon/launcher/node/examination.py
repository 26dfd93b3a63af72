"""Take a snapshot of this node's ranks for an incident, in non-blocking steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from echelon.launcher.control import messages as m
from echelon.launcher.incident.harvest import harvest_steps
from echelon.launcher.incident.worker import Occasion, Worker
from echelon.launcher.job.rundir import RunDirectory, write_json
from echelon.recorder.format.schema import Record
from echelon.recorder.read.dump import pack_dump, write_dump


class Examination:
    """The examination of this node's ranks for one incident.

    Args:
        gap_s: the time between the two examinations of a stall, in seconds.

    Attributes:
        command: the request for the snapshot.
        due_s: the time on the monotonic clock at which the next step is due.
    """

    def __init__(
        self, command: m.Collect, workers: Sequence[Worker], occasion: Occasion, gap_s: float
    ) -> None:
        self.command = command
        self.due_s = 0.0
        self._workers = workers
        self._is_urgent = False
        self._steps = harvest_steps(workers, occasion, lambda: self._is_urgent, gap_s)

    def hurry(self) -> None:
        """Skip the remaining waits in the examination."""
        self._is_urgent = True
        self.due_s = 0.0

    def step(self) -> Sequence[Record] | None:
        """Take the next step; return None, or the ranks' records once all steps have been taken."""
        try:
            self.due_s = time.monotonic() + next(self._steps)
        except StopIteration as end:
            records: Sequence[Record] = end.value
            return records
        return None

    def send(self, records: Sequence[Record], tell: Callable[[m.Event], None]) -> None:
        """Send the ranks' dumps and any dumps from torch's own recorder, in chunks."""
        for worker, record in zip(self._workers, records, strict=True):
            self._send_dump(worker.rank, pack_dump(record), tell, is_torchs=False)
            if worker.torch is not None:
                self._send_dump(worker.rank, worker.torch.read(), tell, is_torchs=True)

    def _send_dump(
        self, rank: int, data: bytes, tell: Callable[[m.Event], None], *, is_torchs: bool
    ) -> None:
        for start in range(0, len(data), m.DUMP_PART_BYTES):
            piece = data[start : start + m.DUMP_PART_BYTES]
            incident = self.command.incident
            tell(m.DumpPart(incident=incident, rank=rank, data=piece, is_torchs=is_torchs))


def keep_alone(
    directory: RunDirectory,
    workers: Sequence[Worker],
    records: Sequence[Record],
    occasion: Occasion,
    reason: str,
) -> Path:
    """Write a snapshot to this node's run directory; return the incident's folder.

    Raises:
        OSError: the snapshot cannot be written.
    """
    number, folder = directory.open_incident()
    for worker, record in zip(workers, records, strict=True):
        write_dump(record, folder / f"rank_{worker.rank}")
        dump = b"" if worker.torch is None else worker.torch.read()
        if dump:
            (folder / f"torch_rank_{worker.rank}").write_bytes(dump)
    about = {
        "format": 1,
        "kind": occasion.kind,
        "number": number,
        "reason": reason,
        "attempt": occasion.attempt,
        "world_size": occasion.world_size,
    }
    write_json(folder / "incident.json", about)
    return directory.complete_incident(number, folder)
