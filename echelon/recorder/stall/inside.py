"""Apply the stall rule inside a process, for jobs without an agent (torchrun, plain Python).

A thread observes the process's own ring once a second. If it detects a stall, it writes the rank's
black box to `dump/incident_<k>` in the folder that all ranks share, and prints one line. The first
rank creates the incident, and the other ranks of the same attempt join it. Unlike an agent, the
thread cannot run while C code holds the GIL, and it does not observe other ranks.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import sys
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path

from echelon.host import process
from echelon.host.facts import ITSELF
from echelon.recorder.format.schema import HostFacts, Identity, Live
from echelon.recorder.read import LiveRing, read_ring
from echelon.recorder.read.dump import write_dump
from echelon.recorder.stall.watchdog import Sight, Stall, StallRule
from echelon.recorder.write.recorder import Recorder

SECOND_LOOK_S = 2.0
JOIN_S = 30.0
_LOOK_S = 1.0


class InsideWatch:
    """A stall detector that watches its own process."""

    def __init__(
        self, recorder: Recorder, rank_dir: Path, record_dir: Path, stall_timeout_s: float
    ) -> None:
        self._recorder = recorder
        self._rank_dir = rank_dir
        self._dump = record_dir / "dump"
        self._look_s = min(_LOOK_S, stall_timeout_s / 5)
        self._rule = StallRule(stall_timeout_s, time.monotonic_ns())
        self._ring = LiveRing(rank_dir / "ring")

    def start(self) -> None:
        """Start a thread that watches the ring."""
        threading.Thread(target=self._run, name="echelon-watchdog", daemon=True).start()

    def _run(self) -> None:
        while not self._recorder.closing.wait(self._look_s):
            stall = self._rule.look([self._sight()], time.monotonic_ns())
            if stall is None:
                continue
            try:
                folder = self._keep(stall)
            except Exception as err:  # noqa: BLE001 -- the job continues whatever happens here
                print(f"echelon: the incident could not be written: {err}", file=sys.stderr)
            else:
                print(f"echelon: {stall.reason}; see {folder}", file=sys.stderr)

    def _sight(self) -> Sight:
        return self._ring.sight(self._recorder.identity.rank)

    def _keep(self, stall: Stall) -> Path:
        pid = os.getpid()
        around = process.Surroundings(pid)
        before, sampled_s = process.sample(pid), time.monotonic()
        stacks, first = own_stacks(), self._ring.activity()
        self._recorder.closing.wait(SECOND_LOOK_S)
        after, gap_s = process.sample(pid), time.monotonic() - sampled_s
        host = HostFacts(
            alive=True,
            process_state=after.state,
            wait_channel=after.wait_channel,
            cpu_share=process.cpu_share(before, after, gap_s),
            rss_bytes=after.rss_bytes,
            stacks=stacks,
            stacks_from=ITSELF,
            snapshot_mono_ns=time.monotonic_ns(),
            later_gap_s=gap_s,
            later_recorded=self._ring.activity() - first,
            later_stacks=own_stacks(),
            later_heartbeat_mono_ns=self._ring.words()[Live.HEARTBEAT_MONO_NS],
            not_permitted=after.not_permitted,
        )
        record = replace(
            read_ring(self._rank_dir / "ring"),
            host=around.add_to(host),
            dumped_mono_ns=time.monotonic_ns(),
        )
        folder = self._open_incident(record.identity, stall.reason)
        write_dump(record, folder / f"rank_{record.identity.rank}")
        return folder

    def _open_incident(self, identity: Identity, reason: str) -> Path:
        """Join an incident that another rank has just created, or create one; return its folder."""
        self._dump.mkdir(mode=0o700, exist_ok=True)
        while True:
            number = max(_numbers(self._dump), default=-1)
            folder = self._dump / f"incident_{number}"
            if number >= 0 and _can_join(folder, identity):
                return folder
            folder = self._dump / f"incident_{number + 1}"
            try:
                folder.mkdir(mode=0o700)
            except FileExistsError:
                continue  # another rank was faster
            self._describe(folder, identity, reason)
            return folder

    def _describe(self, folder: Path, identity: Identity, reason: str) -> None:
        incident = {
            "format": 1,
            "kind": "stall",
            "number": int(folder.name.removeprefix("incident_")),
            "attempt": identity.attempt,
            "world_size": identity.world_size,
            "job_id": identity.job_id,
            "reason": reason,
        }
        part = folder / ".incident.json.part"
        part.write_text(json.dumps(incident, indent=1) + "\n")
        part.rename(folder / "incident.json")
        link = self._dump / f".latest.{identity.rank}"
        with contextlib.suppress(OSError):  # the link is a convenience
            link.unlink(missing_ok=True)
            link.symlink_to(folder.name)
            link.rename(self._dump / "latest")


def _numbers(dump: Path) -> list[int]:
    names = [path.name.removeprefix("incident_") for path in dump.glob("incident_*")]
    return [int(name) for name in names if name.isdecimal()]


def _can_join(folder: Path, identity: Identity) -> bool:
    """Return whether an incident is recent, belongs to this attempt and lacks this rank's dump."""
    is_young = False
    if (folder / f"rank_{identity.rank}").exists():
        return False
    try:
        is_young = abs(time.time() - folder.stat().st_mtime) < JOIN_S
        incident = json.loads((folder / "incident.json").read_text())
    except FileNotFoundError:
        return is_young  # it was created a moment ago, and its description is not written yet
    except (OSError, ValueError):
        return False
    return is_young and incident.get("attempt") == identity.attempt


def own_stacks() -> str:
    """Return the Python stacks of all threads of this process, in faulthandler's format."""
    with tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read().decode("utf-8", "replace")
