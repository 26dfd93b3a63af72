"""Train replicas managed by torchft over echelon's process groups.

    torchft_lighthouse --min_replicas 1 --join_timeout_ms 1000 &
    python examples/torchft_replica.py --name replica_0 --lighthouse http://localhost:29510 &
    python examples/torchft_replica.py --name replica_1 --lighthouse http://localhost:29510

Each process is one replica. If one is killed, the other continues; if it is started again, it
receives the state from the other one. Needs torchft: pip install 'echelon[torchft]'.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import signal
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torchft import Manager
from torchft.optim import OptimizerWrapper

from echelon.dist.torchft import ProcessGroupEchelon

_WIDTH = 32


def parsed() -> argparse.Namespace:
    """Parse and return the options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--name", required=True, help="unique, with a number at its end")
    parser.add_argument("--lighthouse", required=True, help="torchft's server")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--min-replicas", type=int, default=2, help="commit no step with fewer")
    parser.add_argument("--die-at", type=int, default=-1, help="the step at which to be killed")
    return parser.parse_args()


def main() -> None:
    """Train as one replica."""
    options = parsed()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.GELU(), nn.Linear(_WIDTH, 1))
    plain = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def state() -> dict[str, object]:
        return {"model": model.state_dict(), "optimizer": plain.state_dict()}

    def load(state: dict[str, dict[str, object]]) -> None:
        model.load_state_dict(state["model"])
        plain.load_state_dict(state["optimizer"])

    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    group = ProcessGroupEchelon(timeout=timedelta(seconds=60))
    manager = Manager(
        pg=group, load_state_dict=load, state_dict=state, min_replica_size=options.min_replicas,
        replica_id=options.name, lighthouse_addr=options.lighthouse,
        store_addr="localhost", store_port=store.port, rank=0, world_size=1,
    )  # fmt: skip
    optimizer = OptimizerWrapper(manager, plain)
    while manager.current_step() < options.steps:
        optimizer.zero_grad()
        step = manager.current_step()
        place = manager.participating_rank() or 0  # known once the replicas have met
        if step == options.die_at:
            os.kill(os.getpid(), signal.SIGKILL)
        data = torch.Generator().manual_seed(1000 * step + place)
        x = torch.randn(16, _WIDTH, generator=data)
        (model(x) - x.sin().sum(dim=1, keepdim=True)).square().mean().backward()
        for work in [manager.allreduce(one.grad) for one in model.parameters()]:
            work.wait()  # a failure is reported to the manager, which then commits no step
        optimizer.step()
        error = group.errored()
        if error is not None:
            print(f"{options.name}: step {step} again: {type(error).__name__}", flush=True)
    weights = b"".join(one.numpy(force=True).tobytes() for one in model.state_dict().values())
    manager.shutdown(wait=False)
    group.shutdown()
    digest = hashlib.sha256(weights).hexdigest()[:16]
    print(f"finished {manager.current_step()} steps, weights {digest}", flush=True)


if __name__ == "__main__":
    main()
