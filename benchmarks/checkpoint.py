"""Compare checkpoints with torch.save and torch.distributed.checkpoint (DCP).

    python -m benchmarks.checkpoint                           # 2 ranks, replicas, 192 MiB of state
    python -m benchmarks.checkpoint --ranks 4 --shard         # shards of FSDP2
    python -m benchmarks.checkpoint --mib 1024 --folder /mnt/shared

In every round, all contenders in turn save the same model and AdamW state, on the same ranks and
disk. The table shows the best and median time of the slowest rank. "stall" is the time for which a
background save blocks training, which is the duration of the call itself. "total" is the time until
the checkpoint is complete. `torch.save` is what a plain script does: rank 0 writes everything,
flushes and renames, and the others wait. Takes about a minute with the defaults.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

COLUMNS = ("save", "stall", "total", "load")
NAMES = {"echelon": "echelon", "dcp": "torch DCP", "torch": "torch.save"}


def main() -> None:
    """Start the ranks, or run as one of them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--mib", type=int, default=192, help="of weights and AdamW state together")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--shard", action="store_true", help="by torch's FSDP2, as all can save it")
    parser.add_argument("--folder", type=Path, help="where to write (default: a temporary one)")
    options = parser.parse_args()
    if "RANK" in os.environ:
        rank_main(options)
    else:
        start_ranks(options)


def start_ranks(options: argparse.Namespace) -> None:
    """Run one process per rank; end the benchmark if a rank fails."""
    from echelon.store import StoreServer

    with (
        tempfile.TemporaryDirectory(dir=options.folder) as folder,
        StoreServer("127.0.0.1", 0) as server,
    ):
        env = {
            **os.environ,
            "WORLD_SIZE": str(options.ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(server.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, __file__, *sys.argv[1:], "--folder", folder]
        ranks = [
            subprocess.Popen(command, env={**env, "RANK": str(rank)})
            for rank in range(options.ranks)
        ]
        codes = [rank.wait() for rank in ranks]
    sys.exit(max(codes))


def rank_main(options: argparse.Namespace) -> None:
    """Measure every contender in every round."""
    import torch.distributed as dist

    warnings.filterwarnings("ignore")
    dist.init_process_group("gloo")
    model, optimizer = make_state(options)
    contenders = {
        "echelon": Echelon(model, optimizer, options.folder / "echelon"),
        "dcp": Dcp(model, optimizer, options.folder / "dcp"),
    }
    if not options.shard:
        contenders["torch"] = TorchSave(model, optimizer, options.folder / "torch.pt")
    times: dict[tuple[str, str], list[float]] = {}
    for round_number in range(options.rounds + 1):
        for name, contender in contenders.items():
            for column, seconds in contender.measure().items():
                if round_number > 0:  # the first one warms up
                    times.setdefault((name, column), []).append(slowest(seconds))
    if dist.get_rank() == 0:
        print_table(options, times)
    dist.destroy_process_group()


def make_state(options: argparse.Namespace) -> tuple[Any, Any]:
    """Return a model of equal layers, and its optimizer after one step."""
    import torch
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    width, layer_bytes = 1024, 3 * 4 * 1024 * 1024
    num_layers = max(1, options.mib * 1024 * 1024 // layer_bytes)
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(num_layers)))
    if options.shard:
        fully_shard(model, mesh=init_device_mesh("cpu", (options.ranks,)))
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


class Echelon:
    """Echelon's checkpoint."""

    def __init__(self, model: Any, optimizer: Any, path: Path) -> None:
        self.state = {"model": model, "optimizer": optimizer, "step": 1}
        self.path = path

    def measure(self) -> dict[str, float]:
        """Return the measured times in seconds, keyed by the table's columns."""
        from echelon.dist.checkpoint import load, save

        pending: list[Any] = []
        save_s = timed(lambda: save(self.path, self.state))
        stall_s = timed(lambda: pending.append(save(self.path, self.state, async_op=True)))
        rest_s = timed(pending[0].wait, together=False)
        load_s = timed(lambda: load(self.path, self.state))
        return {"save": save_s, "stall": stall_s, "total": stall_s + rest_s, "load": load_s}


class Dcp:
    """torch.distributed.checkpoint, used as in its tutorial."""

    def __init__(self, model: Any, optimizer: Any, path: Path) -> None:
        self.model, self.optimizer, self.path = model, optimizer, path

    def state(self) -> dict[str, Any]:
        """Return the state in the form that DCP expects."""
        from torch.distributed.checkpoint.state_dict import get_state_dict

        weights, moments = get_state_dict(self.model, self.optimizer)
        return {"model": weights, "optimizer": moments}

    def measure(self) -> dict[str, float]:
        """Return the measured times in seconds, keyed by the table's columns."""
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import set_state_dict

        def load() -> None:
            state = self.state()
            dcp.load(state, checkpoint_id=self.path)
            set_state_dict(
                self.model,
                self.optimizer,
                model_state_dict=state["model"],
                optim_state_dict=state["optimizer"],
            )

        save_s = timed(lambda: dcp.save(self.state(), checkpoint_id=self.path))
        pending: list[Any] = []
        stall_s = timed(
            lambda: pending.append(dcp.async_save(self.state(), checkpoint_id=self.path))
        )
        rest_s = timed(pending[0].result, together=False)
        load_s = timed(load)
        return {"save": save_s, "stall": stall_s, "total": stall_s + rest_s, "load": load_s}


class TorchSave:
    """torch.save on rank 0."""

    def __init__(self, model: Any, optimizer: Any, path: Path) -> None:
        self.model, self.optimizer, self.path = model, optimizer, path

    def measure(self) -> dict[str, float]:
        """Return the measured times in seconds, keyed by the table's columns."""
        return {"save": timed(self.save), "load": timed(self.load)}

    def save(self) -> None:
        """Write, flush and rename the file on rank 0, as a careful script does."""
        import torch
        import torch.distributed as dist

        if dist.get_rank() == 0:
            part = self.path.with_suffix(".part")
            with part.open("wb") as stream:
                state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
                torch.save(state, stream)
                stream.flush()
                os.fsync(stream.fileno())
            part.rename(self.path)
        dist.barrier()

    def load(self) -> None:
        """Load the file on every rank."""
        import torch

        state = torch.load(self.path, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])


def timed(action: Callable[[], Any], *, together: bool = True) -> float:
    """Return an action's time on this rank, in seconds; all ranks start it at the same time."""
    import torch.distributed as dist

    if together:
        dist.barrier()
    began_s = time.perf_counter()
    action()
    return time.perf_counter() - began_s


def slowest(seconds: float) -> float:
    """Return the maximum of all ranks' values."""
    import torch
    import torch.distributed as dist

    value = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(value, dist.ReduceOp.MAX)
    return value.item()


def print_table(options: argparse.Namespace, times: dict[tuple[str, str], list[float]]) -> None:
    """Print best (median) in milliseconds, and each peer's best as a multiple of echelon's."""
    kind = "shards" if options.shard else "replicas"
    print(f"{options.ranks} ranks, {kind}, {options.mib} MiB of state; ms: best (median)\n")
    print("| | " + " | ".join(COLUMNS) + " |")
    print("|---" * (len(COLUMNS) + 1) + "|")
    for name in dict.fromkeys(name for name, _ in times):
        cells = []
        for column in COLUMNS:
            values = times.get((name, column))
            if values is None:
                cells.append("-")
                continue
            best, ours = min(values), min(times["echelon", column])
            ratio = "" if name == "echelon" else f", {best / ours:.1f}x"
            cells.append(f"{best * 1e3:.0f} ({statistics.median(values) * 1e3:.0f}){ratio}")
        print(f"| {NAMES[name]} | " + " | ".join(cells) + " |")
    free = shutil.disk_usage(options.folder).free >> 30
    print(f"\nwritten to {options.folder}, {free} GiB free")


if __name__ == "__main__":
    main()
