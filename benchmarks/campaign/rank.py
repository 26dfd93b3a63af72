"""Run as one rank of the campaign's jobs, the same program under both launchers.

    rank.py FOLDER PLAN.json

It averages a vector and saves it every few steps; at the end, the vector must equal the number of
steps. It does not import torch, whose import would slow both launchers' restarts. Rank 0 alone
saves, flushes and renames, in the layout of `echelon.dist.checkpoint`, on a thread that overlaps
with the next steps. While the previous checkpoint is being written, a checkpoint is skipped. After
some seconds, however, the next save supersedes it, unless a superseded one is still being written
(as with `Keeper(patience_s=...)`). Rank 0 also writes each finished step to FOLDER/steps.log, the
campaign's own account of time.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

import echelon.dist as dist
from echelon import recorder
from echelon.recorder.checkpoints import note_checkpoint

_SLOW_S = 30.0  # how long a disk is slow, and
_WRITE_S = 8.0  # how long it takes for a checkpoint then
_PATIENCE_S = 10.0  # how long a checkpoint may take before the next one supersedes it
_FOR_EVER_S = 3600.0
_ON_NODE = ("cut", "cut_for_good", "node_killed", "preempted", "bad_node")
_IN_SAVE = ("slow_disk", "checkpoint_hang")
_SOON = 5  # steps after which a bad node ends its ranks


class Job:
    """One rank of the job."""

    def __init__(self, folder: Path, plan: dict[str, Any]) -> None:
        self.folder, self.plan = folder, plan
        self.is_ours = "ECHELON_RANK_DIR" in os.environ
        self.node = int(os.environ["CAMPAIGN_NODE"])
        self.world = dist.init(timeout_s=60)
        self.writing: Write | None = None
        self.superseded: Write | None = None
        self.log = None
        if self.world.rank == 0:
            self.log = os.open(folder / "steps.log", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        nodes = np.zeros(self.world.size, np.int64)
        self.world.all_gather(nodes, np.array([self.node]))
        self.nodes = [int(node) for node in nodes]
        if not self.is_ours:  # else torch's 30 minutes: what hangs would never restart
            self.world.timeout_s = float(plan["stall_s"])

    def note(self, what: str) -> None:
        """Add a line to the campaign's account."""
        if self.log is not None:
            os.write(self.log, f"{time.time():.3f} {what}\n".encode())

    def run(self) -> int:
        """Train to the last step, or until a preemption; return the exit code."""
        first, x = self._load()
        self.first = first
        self.note(f"begin {first}")
        for step in range(first, self.plan["num_steps"]):
            recorder.step(step)
            stops = dist.should_stop()
            if stops:
                self._save(step, x, is_last=True)
                self._finish_saving()
                return 0 if self.is_ours else 1  # otherwise torchrun considers the job finished
            self._strike(step, _ON_NODE, self._victim_of_node())
            self._strike(step, None, None)
            time.sleep(self.plan["step_s"])
            part = np.ones(1000) / self.world.size
            self.world.all_reduce(part)
            x += part
            self.note(f"step {step}")
            if step % self.plan["save_every"] == self.plan["save_every"] - 1:
                self._save(step + 1, x)
        self._finish_saving()
        assert abs(x[0] - self.plan["num_steps"]) < 1e-6, (x[0], self.plan["num_steps"])
        self.note("end")
        return 0

    # ---- faults ----

    def _victim_of_node(self) -> int:
        """Return the first rank of the node that node faults hit; -1 if only node 0 has ranks."""
        node = max(self.nodes)
        return self.nodes.index(node) if node else -1

    def _strike(self, step: int, kinds: tuple[str, ...] | None, victim: int | None) -> None:
        for number, fault in enumerate(self.plan["faults"]):
            kind = fault["kind"]
            if (kind in kinds) if kinds is not None else (kind not in _ON_NODE + _IN_SAVE):
                struck = self.folder / f"struck_{number}"
                on = fault["rank"] % self.world.size if victim is None else victim
                if kind == "late_exception_always" and struck.exists():
                    on = (int(struck.read_text().split()[3]) + 1) % self.world.size
                if self._is_due(kind, struck, step, fault["step"], on):
                    self._mark(struck, step)
                    self._hit(kind)

    def _is_due(self, kind: str, struck: Path, step: int, at: int, on: int) -> bool:
        if kind == "bad_node" and struck.exists():
            is_bad = int(struck.read_text().split()[2]) == self.node
            return is_bad and step == self.first + _SOON
        if step != at or self.world.rank != on:
            return False
        return kind.endswith("_always") or not struck.exists()

    def _mark(self, struck: Path, step: int) -> None:
        if not struck.exists():
            part = struck.with_suffix(".part")
            part.write_text(f"{time.time():.3f} {step} {self.node} {self.world.rank}")
            part.replace(struck)

    def _hit(self, kind: str) -> None:
        if kind in ("kill", "bad_node"):
            os.kill(os.getpid(), signal.SIGKILL)
        elif kind == "segfault":
            ctypes.string_at(8)
        elif kind == "exit":
            os._exit(3)
        elif kind == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif kind == "hang":
            time.sleep(_FOR_EVER_S)
        elif kind == "spin":
            while True:
                pass
        elif kind == "connection":
            raise ConnectionResetError(104, "Connection reset by peer")
        elif kind.startswith("memory"):
            _use_up_memory()
        elif kind.endswith(("exception", "exception_always")):
            raise ValueError("a corrupt batch")

    def _hit_save(self, step: int) -> None:
        for number, fault in enumerate(self.plan["faults"]):
            if fault["kind"] not in _IN_SAVE or step < fault["step"]:
                continue
            struck = self.folder / f"struck_{number}"
            is_first = not struck.exists()
            self._mark(struck, step)
            if fault["kind"] == "checkpoint_hang" and is_first:
                time.sleep(_FOR_EVER_S)
            if fault["kind"] == "slow_disk":
                since_s = time.time() - float(struck.read_text().split()[0])
                time.sleep(_WRITE_S if since_s < _SLOW_S else 0)

    # ---- checkpoints ----

    def _save(self, step: int, x: np.ndarray, *, is_last: bool = False) -> None:
        """Start saving a copy of the state, unless the previous one is still being written."""
        if self.world.rank != 0:
            return
        if self.writing is not None and self.writing.is_alive():
            left_s = self.writing.since_s + _PATIENCE_S - time.monotonic()
            if is_last:
                with recorder.span("checkpoint"):
                    self.writing.join(max(0.0, left_s))
            elif left_s > 0:
                return
        has_superseded = self.superseded is not None and self.superseded.is_alive()
        if self.writing is not None and self.writing.is_alive() and not has_superseded:
            self.writing.span.__exit__(None)
            self.superseded, self.writing = self.writing, None
        self._finish_saving()
        self.writing = Write(self, step, x.copy())
        self.writing.start()

    def _finish_saving(self) -> None:
        writing, self.writing = self.writing, None
        if writing is not None:
            with recorder.span("checkpoint"):
                writing.join()
            if writing.error is not None:
                raise writing.error

    def write(self, step: int, x: np.ndarray) -> None:
        """Write a checkpoint, or hang if the plan has this fault."""
        self._hit_save(step)
        folder = self.folder / "checkpoints" / f"step_{step:08d}"
        version = folder / "000001"
        version.mkdir(parents=True, exist_ok=True)
        for name, content in (("state", x.tobytes()), ("commit", b"whole")):
            part = version / f"{name}.part"
            with part.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            part.replace(version / name)
        note_checkpoint(folder, step)

    def _load(self) -> tuple[int, np.ndarray]:
        found = os.environ.get("ECHELON_RESUME") if self.is_ours else self._newest()
        if not found:
            return 0, np.zeros(1000)
        folder = Path(found)
        state = np.frombuffer((folder / "000001" / "state").read_bytes()).copy()
        return int(folder.name.rpartition("_")[2]), state

    def _newest(self) -> str | None:
        """Return the newest checkpoint, as rank 0 sees it."""
        path = b""
        if self.world.rank == 0:
            marks = sorted((self.folder / "checkpoints").glob("step_*/*/commit"))
            path = str(marks[-1].parent.parent).encode() if marks else b""
        told: object = self.world.broadcast_object(path.decode(), 0)
        return str(told) or None


class Write(threading.Thread):
    """A thread that writes a checkpoint. If it hangs, the program exits without waiting for it."""

    def __init__(self, job: Job, step: int, x: np.ndarray) -> None:
        super().__init__(daemon=True)
        self.since_s = time.monotonic()
        self.span = recorder.span("checkpoint_write")
        self.error: Exception | None = None
        self._job, self._step, self._x = job, step, x

    def run(self) -> None:
        """Write the checkpoint."""
        try:
            with self.span:
                self._job.write(self._step, self._x)
        except Exception as error:  # noqa: BLE001 -- raised by the next save
            self.error = error


def _use_up_memory() -> None:
    """Exceed a memory limit that this process has set for itself."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20),) * 2)
    held = []
    while True:
        held.append(np.ones(1 << 20))


if __name__ == "__main__":
    job = Job(Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text()))
    code = job.run()
    dist.shutdown()
    sys.exit(code)
