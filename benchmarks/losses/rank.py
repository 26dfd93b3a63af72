"""Train as one rank that injects a plan's losses of ranks and nodes; see `plan`.

Without the launcher's protection, it saves its state at each step and resumes from it.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import echelon.dist as dist
from benchmarks.losses.faults import Faults
from benchmarks.losses.model import NUM_MICRO_BATCHES, new_model, new_optimizer, predicted
from echelon.dist import checkpoint, resilient
from echelon.dist.fsdp import fully_shard
from echelon.dist.resilient.copies.memory import CopyMemory
from echelon.train.same_bits import SameBits, fingerprint

FOLDER = Path(sys.argv[1])
PLAN = json.loads((FOLDER / "plan.json").read_text())
RANK = int(os.environ["RANK"])
IS_PROTECTED = os.environ.get("ECHELON_ON_LOSS", "") != ""
SAVED = FOLDER / "saved"


class Training:
    """One rank's training."""

    def __init__(self, faults: Faults) -> None:
        self._faults = faults
        self._commits = (FOLDER / f"{RANK}.commits").open("a", buffering=1)
        self._lost: dict[int, str] = {}  # by step: the ranks that its world had lost
        self._model = new_model()
        if PLAN["is_sharded"]:
            for layer in (self._model[0], self._model[2]):
                fully_shard(layer)
            fully_shard(self._model)
        self._optimizer = new_optimizer(self._model)

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
        same = SameBits(
            self._model, self._optimizer, micro_batches=NUM_MICRO_BATCHES, seed=1, probe=False
        )
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
        found, right = predicted(self._model, step, number)
        found.register_hook(lambda _: self._faults.at("backward"))
        return (found - right).square().mean()

    def _note(self, step: int, _: None) -> None:
        self._commits.write(f"{step} {time.monotonic()} {self._lost[step]}\n")
        if not IS_PROTECTED and RANK == 0:
            state = {"model": self._model.state_dict(), "optimizer": self._optimizer.state_dict()}
            torch.save({"step": step + 1, **state}, SAVED.with_suffix(".part"))
            SAVED.with_suffix(".part").replace(SAVED)

    def _resume(self) -> int:
        """Load the last saved state in an attempt without protection; return its first step."""
        if IS_PROTECTED or not SAVED.exists():
            return 0
        saved = torch.load(SAVED, weights_only=True)
        self._model.load_state_dict(saved["model"])
        self._optimizer.load_state_dict(saved["optimizer"])
        return int(saved["step"])

    def _load(self) -> int:
        """Load the checkpoint after all copies of a shard have been lost; return its step."""
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
    """Train, and inject the planned losses."""
    torch.set_num_threads(1)
    (FOLDER / f"{RANK}.pid").write_text(str(os.getpid()))
    dist.init(timeout_s=300)  # what is imported on demand would look like a stall after it
    faults = Faults(FOLDER, RANK, PLAN)
    _before_copies_complete(faults)
    found = Training(faults).run()
    (FOLDER / f"{RANK}.hash").write_text(found)
    dist.shutdown()


if __name__ == "__main__":
    main()
