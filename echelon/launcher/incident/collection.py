"""Collect the dumps of one incident as the nodes send them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO

from echelon.launcher.control import messages as m
from echelon.launcher.coordinator.world import LostEarlier
from echelon.launcher.job.report import Ended, Incident
from echelon.launcher.job.rundir import RunDirectory, write_json


class Collection:
    """A hidden folder that receives the dumps of one incident until all dumps have arrived.

    Args:
        nodes: the nodes that will send dumps.
        deadline_s: the monotonic time at which the collection ends even if dumps are missing.
        is_survived: whether the attempt continues despite the incident.
        lost_earlier: the losses that the attempt had survived before this incident.
        set_aside: the number <k> in the new name of each lost rank's folder,
            `lost_<k>_of_attempt_<n>`, keyed by rank.
        continues: the earlier incident that is replaced by this incident, or None.

    Attributes:
        waiting: the nodes that have not sent all their dumps yet.
        has_progressed: whether ranks have made progress since the collection began.

    Raises:
        OSError: the folder cannot be created.
    """

    def __init__(
        self,
        directory: RunDirectory,
        *,
        kind: str,
        reason: str,
        attempt: int,
        nodes: Iterable[str],
        deadline_s: float,
        is_early: bool = False,
        is_survived: bool = False,
        lost_earlier: LostEarlier | None = None,
        set_aside: Mapping[int, int] | None = None,
        continues: Incident | None = None,
    ) -> None:
        self.number, self._folder = directory.open_incident()
        self.waiting = set(nodes)
        self.deadline_s = deadline_s
        self._directory = directory
        self.kind = kind
        self.is_early = is_early
        self.is_survived = is_survived
        self.continues = continues
        self.lost_earlier = lost_earlier or LostEarlier()
        self._set_aside = set_aside or {}
        self.has_progressed = False
        self._reason, self._attempt = reason, attempt
        self._files: dict[str, IO[bytes]] = {}
        self._present: set[int] = set()  # ranks whose black box has arrived

    def keep(self, part: m.DumpPart) -> None:
        """Append a received part of a dump to the dump's file.

        Raises:
            OSError: the part cannot be written.
        """
        if part.incident != self.number:
            return
        name = f"torch_rank_{part.rank:d}" if part.is_torchs else f"rank_{part.rank:d}"
        file = self._files.get(name)
        if file is None:
            file = self._files[name] = (self._folder / name).open("wb")
        file.write(part.data)
        if not part.is_torchs:
            self._present.add(part.rank)

    def note_harvested(self, node: str, event: m.Harvested) -> None:
        """Record that a node has sent all its dumps."""
        if event.incident == self.number:
            self.waiting.discard(node)

    def is_complete(self, now_s: float) -> bool:
        """Return whether all dumps have arrived or the deadline has passed."""
        return not self.waiting or now_s >= self.deadline_s

    def finish(
        self,
        job_id: str,
        world_size: int,
        why_absent: Callable[[int], str],
        ranks_lost: Sequence[int],
        ended: Iterable[Ended],
        probes: Sequence[str] = (),
    ) -> Incident:
        """Write incident.json, and rename the folder to its final name.

        Args:
            probes: the measurements made before the attempt, as one sentence per probe.

        Raises:
            OSError: the incident cannot be written.
        """
        self.close()
        absent = sorted(set(range(world_size)) - self._present)
        write_json(
            self._folder / "incident.json",
            {
                "format": 1,
                "kind": self.kind,
                "early": self.is_early,
                "number": self._shown_number,
                "attempt": self._attempt,
                "world_size": world_size,
                "job_id": job_id,
                "reason": self._reason,
                "ranks_present": sorted(self._present),
                "ranks_lost": list(ranks_lost),
                "ended": [[one.rank, one.code, one.order] for one in ended],
                "lost_earlier": sorted(map(list, self.lost_earlier.ranks.items())),
                "set_aside": sorted(map(list, self._set_aside.items())),
                "epoch_since_mono_ns": self.lost_earlier.since_mono_ns,
                "epoch_since_there_ns": sorted(map(list, self.lost_earlier.since_there_ns.items())),
                "probes": list(probes),
                "ranks_absent": {str(rank): why_absent(rank) for rank in absent},
            },
        )
        folder = self._show()
        return Incident(
            folder,
            self.kind,
            self._attempt,
            self._reason,
            is_early=self.is_early,
            lost_earlier=self.lost_earlier.ranks,
        )

    @property
    def _shown_number(self) -> int:
        if self.continues is None:
            return self.number
        return int(self.continues.folder.name.rpartition("_")[2])

    def _show(self) -> Path:
        if self.continues is None:
            return self._directory.complete_incident(self.number, self._folder)
        return self._directory.replace_incident(self._folder, self.continues.folder)

    def close(self) -> None:
        """Close the dump files.

        Raises:
            OSError: the last data could not be written to disk.
        """
        while self._files:
            self._files.popitem()[1].close()
