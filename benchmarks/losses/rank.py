"""A training whose ranks lose themselves, or their nodes, as a plan says; see `plan`.

Without the launcher's protection it saves its state at each step, and continues from there.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import echelon.dist as dist
from echelon.dist import checkpoint, resilient
from echelon.dist.fsdp import fully_shard
from echelon.dist.resilient.copies.memory import CopyMemory
from echelon.train.same_bits import SameBits, fingerprint

FOLDER = Path(sys.argv[1])
PLAN = json.loads((FOLDER / "plan.json").read_text())
RANK = int(os.environ["RANK"])
IS_PROTECTED = os.environ.get("ECHELON_ON_LOSS", "") != ""
SAVED = FOLDER / "saved"
_WIDTH = 64


class Faults:
    """What this rank does to itself, to other ranks or to nodes."""

    def __init__(self) -> None:
        mine = [
            (FOLDER / f"{number}.fired", fault)
            for number, fault in enumerate(PLAN["faults"])
            if fault["ranks"][0] == RANK
        ]
        self._left = [(marker, fault) for marker, fault in mine if not marker.exists()]
        self.step = -1

    def at(self, moment: str) -> None:
        """Cause what the plan has for this moment of this step or an earlier one."""
        for marker, fault in self._left:
            if fault["moment"] == moment and fault["step"] <= self.step:
                self._fire(marker, fault)

    def begin(self, step: int) -> None:
        """Begin a step, in which a fault may occur at a time that no code chooses."""
        self.step = step
        self._after(" us")

    def begin_save(self) -> None:
        """Begin a save, in which a fault may occur at a time that no code chooses."""
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
                subprocess.run(PLAN["cut"][node], check=True, timeout=60)
            return
        names = [f"node_{node}" for node in fault["nodes"]]
        names += [str(rank) for rank in fault["ranks"] if rank != RANK]
        for name in names:
            os.kill(int((FOLDER / f"{name}.pid").read_text()), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGSTOP if how == "stop" else signal.SIGKILL)


class Training:
    """One rank's training."""

    def __init__(self, faults: Faults) -> None:
        self._faults = faults
        self._commits = (FOLDER / f"{RANK}.commits").open("a", buffering=1)
        self._lost: dict[int, str] = {}  # by step: the ranks that its world had lost
        torch.manual_seed(0)
        self._model = nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.GELU(), nn.Linear(_WIDTH, 1))
        if PLAN["is_sharded"]:
            for layer in (self._model[0], self._model[2]):
                fully_shard(layer)
            fully_shard(self._model)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-3)

    def run(self) -> str:
        """Train all steps; return the hash of weights and optimizer state."""
        resilient.run(
            self._prepare, self._model, self._optimizer, total=PLAN["total"], first=self._resume(),
            on_commit=self._note, from_checkpoint=self._load if PLAN["is_sharded"] else None,
        )  # fmt: skip
        return fingerprint(self._model, self._optimizer)

    def _prepare(self, world: resilient.World) -> Callable[[int], None]:
        if world.epoch:
            self._faults.at("recovery")
        same = SameBits(self._model, self._optimizer, micro_batches=12, seed=1, probe=False)
        lost = ",".join(map(str, world.lost))

        def train_step(step: int) -> None:
            self._faults.begin(step)
            if PLAN["is_sharded"] and step % PLAN["save_every"] == 0:
                self._faults.begin_save()
                checkpoint.save(SAVED, self._state(step))
            same.backward(step, lambda number: self._loss(step, number))
            same.clip_grad_norm_(1.0)
            self._optimizer.step()
            self._faults.at("optimizer")
            self._lost[step] = lost

        return train_step

    def _loss(self, step: int, number: int) -> torch.Tensor:
        self._faults.at("forward")
        data = torch.Generator().manual_seed(1000 * step + number)
        x = torch.randn(32, _WIDTH, generator=data)
        found: torch.Tensor = self._model(x)
        found.register_hook(lambda _: self._faults.at("backward"))
        return (found - x.sin().sum(dim=1, keepdim=True)).square().mean()

    def _note(self, step: int, _: None) -> None:
        self._commits.write(f"{step} {time.monotonic()} {self._lost[step]}\n")
        if not IS_PROTECTED and RANK == 0:
            state = {"model": self._model.state_dict(), "optimizer": self._optimizer.state_dict()}
            torch.save({"step": step + 1, **state}, SAVED.with_suffix(".part"))
            SAVED.with_suffix(".part").replace(SAVED)

    def _resume(self) -> int:
        """Load what a restarted attempt without protection has saved; return its first step."""
        if IS_PROTECTED or not SAVED.exists():
            return 0
        saved = torch.load(SAVED, weights_only=True)
        self._model.load_state_dict(saved["model"])
        self._optimizer.load_state_dict(saved["optimizer"])
        return int(saved["step"])

    def _load(self) -> int:
        """Load the checkpoint after all copies of a shard are lost."""
        step = int(checkpoint.load(SAVED, self._state(0))["step"])
        with (FOLDER / f"{RANK}.loads").open("a") as loads:
            loads.write(f"{step} {time.monotonic()}\n")
        return step

    def _state(self, step: int) -> dict[str, Any]:
        return {"model": self._model, "optimizer": self._optimizer, "step": step}


def _before_copies_complete(faults: Faults) -> None:
    """Let a fault occur while this rank copies its shards."""
    commit = CopyMemory.commit

    @functools.wraps(commit)
    def armed(*args: Any, **options: Any) -> Any:
        faults.at("copy")
        return commit(*args, **options)

    CopyMemory.commit = armed  # type: ignore[method-assign]


def main() -> None:
    """Train, and lose what is planned."""
    torch.set_num_threads(1)
    (FOLDER / f"{RANK}.pid").write_text(str(os.getpid()))
    dist.init(timeout_s=300)  # what is imported on demand would look like a stall after it
    faults = Faults()
    _before_copies_complete(faults)
    found = Training(faults).run()
    (FOLDER / f"{RANK}.hash").write_text(found)
    dist.shutdown()


if __name__ == "__main__":
    main()
