"""Run the campaign's training under torchft, as one replica in a process of its own.

A step's micro-batches are distributed over the replicas of torchft's quorum. If torchft does not
commit a step, the remaining replicas therefore repeat it, including the lost replica's samples.
Along with the gradients, the replicas sum the numbers of their micro-batches, which yields the
number of samples in each committed step.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from datetime import timedelta
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchft import Manager
from torchft.optim import OptimizerWrapper
from torchft.process_group import ProcessGroupGloo

from benchmarks.losses.faults import Faults
from benchmarks.losses.model import NUM_MICRO_BATCHES, new_model, new_optimizer, predicted
from echelon.dist.torchft import ProcessGroupEchelon
from echelon.train.same_bits import fingerprint
from tests.support.ranks import _die_with_the_test

_GROUPS = {"gloo": ProcessGroupGloo, "echelon": ProcessGroupEchelon}
_START_S = 300.0


def main(
    folder: Path, rank: int, plan: Mapping[str, Any], lighthouse: str, all_here: Barrier
) -> None:
    """Train, and inject the planned losses.

    Args:
        plan: the fields of `Plan`, plus `group` ("gloo" or "echelon") and `timeout_s`.
        lighthouse: the address of torchft's lighthouse server.
        all_here: the barrier at which the replicas wait for each other before the first step.
    """
    _die_with_the_test()
    log = os.open(folder / f"node_{rank}.log", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    for number in (1, 2):
        os.dup2(log, number)
    torch.set_num_threads(1)
    (folder / f"{rank}.pid").write_text(str(os.getpid()))
    training = _Training(folder, rank, plan, lighthouse)
    all_here.wait(_START_S)
    training.run()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # torchft's threads may still wait for a replica that has ended


class _Training:
    def __init__(self, folder: Path, rank: int, plan: Mapping[str, Any], lighthouse: str) -> None:
        self._folder, self._rank, self._plan = folder, rank, plan
        self._faults = Faults(folder, rank, plan)
        self._model = new_model()
        plain = new_optimizer(self._model)

        def state() -> dict[str, Any]:
            return {"model": self._model.state_dict(), "optimizer": plain.state_dict()}

        def load(state: Mapping[str, Any]) -> None:
            self._model.load_state_dict(state["model"])
            plain.load_state_dict(state["optimizer"])

        timeout = timedelta(seconds=plan["timeout_s"])
        self._store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        self._manager = Manager(
            pg=_GROUPS[plan["group"]](timeout=timeout), load_state_dict=load, state_dict=state,
            min_replica_size=1, timeout=timeout, replica_id=f"replica_{rank}",
            lighthouse_addr=lighthouse, store_addr="localhost", store_port=self._store.port,
            rank=0, world_size=1, init_sync=False,
        )  # fmt: skip
        self._plain, self._optimizer = plain, OptimizerWrapper(self._manager, plain)

    def run(self) -> None:
        """Train all steps, and save the weights and their hash."""
        with (self._folder / f"{self._rank}.commits").open("a", buffering=1) as commits:
            while self._manager.current_step() < self._plan["total"]:
                line = self._step()
                if line:
                    commits.write(line)
        torch.save(self._model.state_dict(), self._folder / f"{self._rank}.weights")
        found = fingerprint(self._model, self._plain)
        (self._folder / f"{self._rank}.hash").write_text(found)
        self._manager.shutdown(wait=False)

    def _step(self) -> str:
        """Train one step; return its line for the log, or "" if it was not committed."""
        self._optimizer.zero_grad()  # asks for a quorum
        place = self._manager.participating_rank() or 0  # known once there is one
        num_places = self._manager.num_participants()
        step = self._manager.current_step()
        self._faults.begin(step)
        numbers = range(
            place * NUM_MICRO_BATCHES // num_places, (place + 1) * NUM_MICRO_BATCHES // num_places
        )
        for number in numbers:
            self._faults.at("forward")
            found, right = predicted(self._model, step, number)
            found.register_hook(lambda _: self._faults.at("backward"))
            (found - right).square().mean().div(len(numbers)).backward()
        count = torch.tensor([float(len(numbers))])
        gradients = [one.grad for one in self._model.parameters()]
        works = [self._manager.allreduce(one) for one in (*gradients, count)]
        for work in works:
            work.wait()  # a failure is reported to the manager, which then commits no step
        nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        self._faults.at("optimizer")
        if self._manager.current_step() == step:
            return ""
        with (self._folder / f"{self._rank}.counts").open("a") as counts:
            counts.write(f"{step} {round(count.item() * num_places)}\n")
        lost = [] if num_places == self._plan["ranks_per_node"] else self._planned()
        return f"{step} {time.monotonic()} {','.join(map(str, lost))}\n"

    def _planned(self) -> list[int]:
        return [rank for fault in self._plan["faults"] for rank in fault["ranks"]]
