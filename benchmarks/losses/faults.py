"""Inject the faults of a campaign's plan from inside a rank."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class Faults:
    """The faults that this rank injects into itself, other ranks or nodes."""

    def __init__(self, folder: Path, rank: int, plan: Mapping[str, Any]) -> None:
        self._folder, self._rank, self._cut = folder, rank, plan["cut"]
        mine = [
            (folder / f"{number}.fired", fault)
            for number, fault in enumerate(plan["faults"])
            if fault["ranks"][0] == rank
        ]
        self._left = [(marker, fault) for marker, fault in mine if not marker.exists()]
        self.step = -1

    def at(self, moment: str) -> None:
        """Inject the faults planned for this moment of this step or an earlier one."""
        for marker, fault in self._left:
            if fault["moment"] == moment and fault["step"] <= self.step:
                self._fire(marker, fault)

    def begin(self, step: int) -> None:
        """Begin a step, and start the timers of the faults planned within it."""
        self.step = step
        self._after(" us")

    def begin_save(self) -> None:
        """Begin a save, and start the timers of the faults planned within it."""
        self._after(" us of a save")

    def _after(self, unit: str) -> None:
        for one in list(self._left):
            marker, fault = one
            if fault["moment"].endswith(unit) and fault["step"] <= self.step:
                self._left.remove(one)
                delay_s = int(fault["moment"].split()[0]) / 1e6
                threading.Timer(delay_s, self._fire, (marker, fault)).start()

    def _fire(self, marker: Path, fault: dict[str, Any]) -> None:
        part = marker.with_suffix(".part")
        part.write_text(f"{self.step} {time.monotonic()}")
        part.rename(marker)
        how = fault["how"]
        if how == "hang":
            lock = threading.Lock()
            with lock, lock:  # waits for itself
                return
        if how == "cut":
            self._left = [one for one in self._left if one[0] != marker]
            for node in fault["nodes"]:
                subprocess.run(self._cut[node], check=True, timeout=60)
            return
        names = [f"node_{node}" for node in fault["nodes"]]
        names += [str(rank) for rank in fault["ranks"] if rank != self._rank]
        for name in names:
            os.kill(int((self._folder / f"{name}.pid").read_text()), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGSTOP if how == "stop" else signal.SIGKILL)
