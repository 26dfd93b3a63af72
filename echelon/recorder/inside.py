"""The stall rule from inside a process, for jobs that no agent watches (torchrun, plain Python).

A thread looks at the process's own ring once a second. On a stall it writes this rank's black box,
looked at twice, to `incident_<k>` in the rank's folder, and says so in one line. It sees less than
an agent: nothing while C code holds the GIL, and of the other ranks nothing at all. All that it
needs is imported before the first look: nothing is imported in a process that is stuck.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path

from echelon.recorder import signals
from echelon.recorder.dump import write_dump
from echelon.recorder.read import LiveRing, read_ring
from echelon.recorder.recorder import Recorder
from echelon.recorder.schema import HostFacts, Live
from echelon.recorder.watchdog import Sight, Stall, StallRule

SECOND_LOOK_S = 2.0
_LOOK_S = 1.0


class InsideWatch:
    """Watches the ring of its own process."""

    def __init__(self, recorder: Recorder, rank_dir: Path, stall_timeout_s: float) -> None:
        self._recorder = recorder
        self._rank_dir = rank_dir
        self._look_s = min(_LOOK_S, stall_timeout_s / 5)
        self._rule = StallRule(stall_timeout_s, time.monotonic_ns())
        self._ring = LiveRing(rank_dir / "ring")

    def start(self) -> None:
        """Watch from now on, in a thread."""
        threading.Thread(target=self._run, name="echelon-watchdog", daemon=True).start()

    def _run(self) -> None:
        while not self._recorder.closing.wait(self._look_s):
            stall = self._rule.look([self._sight()], time.monotonic_ns())
            if stall is None:
                continue
            try:
                folder = self._keep(stall)
            except Exception as err:  # noqa: BLE001 -- the job goes on, whatever this meets
                print(f"echelon: the stall was not kept: {err}", file=sys.stderr)
            else:
                print(f"echelon: {stall.reason}; see {folder}", file=sys.stderr)

    def _sight(self) -> Sight:
        return self._ring.sight(self._recorder.identity.rank)

    def _keep(self, stall: Stall) -> Path:
        pid = os.getpid()
        around = signals.Surroundings(pid)
        before, sampled_s = signals.sample(pid), time.monotonic()
        stacks, first = own_stacks(), self._ring.activity()
        self._recorder.closing.wait(SECOND_LOOK_S)
        after, gap_s = signals.sample(pid), time.monotonic() - sampled_s
        host = HostFacts(
            alive=True,
            process_state=after.state,
            wait_channel=after.wait_channel,
            cpu_share=signals.cpu_share(before, after, gap_s),
            rss_bytes=after.rss_bytes,
            stacks=stacks,
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
        number, folder = self._open_incident()
        rank = record.identity.rank
        write_dump(record, folder / f"rank_{rank}")
        incident = {
            "format": 1,
            "kind": "stall",
            "number": number,
            "attempt": record.identity.attempt,
            "world_size": record.identity.world_size,
            "job_id": record.identity.job_id,
            "reason": stall.reason,
            "ranks": {str(rank): "ring"},
        }
        (folder / "incident.json").write_text(json.dumps(incident, indent=1) + "\n")
        final = folder.with_name(f"incident_{number}")
        folder.rename(final)
        return final

    def _open_incident(self) -> tuple[int, Path]:
        """Make the hidden folder of the first incident that is not there yet."""
        number = 0
        while (self._rank_dir / f"incident_{number}").exists():
            number += 1
        folder = self._rank_dir / f".incident_{number}.partial"
        folder.mkdir(mode=0o700, exist_ok=True)
        return number, folder


def own_stacks() -> str:
    """Return the Python stacks of all threads of this process, in faulthandler's form."""
    with tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read().decode("utf-8", "replace")
