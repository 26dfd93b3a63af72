"""A training whose ranks kill or stop themselves as a plan says; see losses.py.

Without the launcher's protection it saves its state at each step, and begins again from there.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import echelon.dist as dist
from echelon.dist import resilient
from echelon.train.same_bits import SameBits, fingerprint

FOLDER, TOTAL = Path(sys.argv[1]), int(sys.argv[2])
RANK = int(os.environ["RANK"])
IS_PROTECTED = os.environ.get("ECHELON_ON_LOSS", "") != ""
SAVED = FOLDER / "saved"
_WIDTH = 64


def planned() -> list[tuple[Path, str, str, int]]:
    """Return what ends this rank and has not yet: its marker, how, the moment, and the step."""
    plan = json.loads((FOLDER / "plan.json").read_text())
    mine = [
        (FOLDER / f"{number}.fired", how, moment, step)
        for number, (rank, how, moment, step) in enumerate(plan)
        if rank == RANK
    ]
    return [one for one in mine if not one[0].exists()]


class Faults:
    """What ends this rank."""

    def __init__(self) -> None:
        self._left = planned()
        self.step = -1

    def at(self, moment: str) -> None:
        """End this rank if the plan says so for this moment of this step or an earlier one."""
        for marker, how, when, step in self._left:
            if when == moment and step <= self.step:
                self._fire(marker, how)

    def begin(self, step: int) -> None:
        """Begin a step, in which a rank may end at a time that no code chooses."""
        self.step = step
        for one in list(self._left):
            marker, how, moment, when = one
            if moment.endswith(" us") and when <= step:
                self._left.remove(one)
                delay_s = int(moment.split()[0]) / 1e6
                threading.Timer(delay_s, self._fire, (marker, how)).start()

    def _fire(self, marker: Path, how: str) -> None:
        part = marker.with_suffix(".part")
        part.write_text(f"{self.step} {time.monotonic()}")
        part.rename(marker)
        os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGSTOP)


def main() -> None:
    """Train, and end as planned."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.GELU(), nn.Linear(_WIDTH, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    first = 0
    if SAVED.exists():
        saved = torch.load(SAVED, weights_only=True)
        first = saved["step"]
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    dist.init(timeout_s=300)  # what is imported on demand would look like a stall after it
    faults = Faults()
    commits = (FOLDER / f"{RANK}.commits").open("a", buffering=1)

    def loss_of(step: int, number: int) -> torch.Tensor:
        faults.at("forward")
        data = torch.Generator().manual_seed(1000 * step + number)
        x = torch.randn(32, _WIDTH, generator=data)
        found: torch.Tensor = model(x)
        found.register_hook(lambda _: faults.at("backward"))
        return (found - x.sin().sum(dim=1, keepdim=True)).square().mean()

    def prepare(world: resilient.World) -> Callable[[int], None]:
        if world.epoch:
            faults.at("recovery")
        same = SameBits(model, optimizer, micro_batches=12, seed=1, probe=False)

        def train_step(step: int) -> None:
            faults.begin(step)
            same.backward(step, lambda number: loss_of(step, number))
            same.clip_grad_norm_(1.0)
            optimizer.step()
            faults.at("optimizer")

        return train_step

    def note(step: int, _: None) -> None:
        commits.write(f"{step} {time.monotonic()}\n")
        if not IS_PROTECTED and RANK == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({"step": step + 1, **state}, SAVED.with_suffix(".part"))
            SAVED.with_suffix(".part").replace(SAVED)

    resilient.run(prepare, model, optimizer, total=TOTAL, first=first, on_commit=note)
    (FOLDER / f"{RANK}.hash").write_text(fingerprint(model, optimizer))
    dist.shutdown()


if __name__ == "__main__":
    main()
