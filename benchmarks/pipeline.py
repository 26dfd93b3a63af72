"""Compare a pipeline's step time with torch's pipelining over gloo, and with the simulation.

    python -m benchmarks.pipeline                       # about 3 minutes on 2 quiet cores
    python -m benchmarks.pipeline --preset thin --rounds 30 --only zbv

Each row is printed as soon as it is measured.

Two ranks hold the same stages in echelon's pipeline (over shm, and over gloo) and in torch's.
torch's ranks are separate processes, idle between their steps, because echelon's ranks change the
heap's settings (`echelon/dist/heap.py`). Every round runs one step of each in turn, so that a slow
moment of the machine affects all of them. A step takes as long as its slowest rank. "x torch" is
the median of the rounds' ratios; below 1 is faster. CPU time is that of both ranks with all their
threads. The costs of each stage's forward, input gradient and weight gradient are measured while
both ranks compute, and the latency of the link is measured too; "simulated" is the resulting
makespan.

Presets: `gpt` is a char-level GPT (10.7M parameters, 8 x 256 tokens); `thin` has 1/6 of its width
and 8 times its tokens, so that messages weigh more.
"""

# ruff: noqa: D101, D102, D103 -- a script: main() reads top-down
from __future__ import annotations

import argparse
import itertools
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RANKS = 2


@dataclass(frozen=True)
class Preset:
    width: int
    num_heads: int
    num_blocks: int
    tokens: int
    batch: int
    vocabulary: int = 65


PRESETS = {
    "gpt": Preset(width=384, num_heads=6, num_blocks=6, tokens=256, batch=8),
    "thin": Preset(width=64, num_heads=1, num_blocks=8, tokens=512, batch=32),
    "tiny": Preset(width=32, num_heads=1, num_blocks=4, tokens=32, batch=4),
}
CASES = {  # name -> chunks a rank, whether torch has it under this name
    "1f1b": (1, "Schedule1F1B"),
    "interleaved_1f1b": (2, "ScheduleInterleaved1F1B"),
    "interleaved_zero_bubble": (2, "ScheduleInterleavedZeroBubble"),
    "zbv": (2, "ScheduleZBVZeroBubble"),
}


def layers(preset: Preset) -> list[Any]:
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            width = preset.width
            self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
            self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

        def forward(self, x: Any) -> Any:
            batch, tokens, width = x.shape
            parts = self.mix(self.first(x)).view(batch, tokens, 3, preset.num_heads, -1)
            q, k, v = parts.permute(2, 0, 3, 1, 4)
            y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(y.transpose(1, 2).reshape(batch, tokens, width))
            return x + self.down(nn.functional.gelu(self.up(self.second(x))))

    torch.manual_seed(1)
    blocks = [Block() for _ in range(preset.num_blocks)]
    embed = nn.Embedding(preset.vocabulary, preset.width)
    head = nn.Sequential(
        nn.LayerNorm(preset.width), nn.Linear(preset.width, preset.vocabulary, bias=False)
    )
    return [embed, *blocks, head]


def stages_of(preset: Preset, num_stages: int, mine: tuple[int, ...]) -> dict[int, Any]:
    from echelon.dist.pipeline import split

    costs = [0.2] + [1.0] * preset.num_blocks + [0.4]
    parts = split(layers(preset), num_stages, costs=costs)
    return {index: parts[index] for index in mine}


def loss_fn(output: Any, targets: Any) -> Any:
    from torch import nn

    return nn.functional.cross_entropy(output.flatten(0, 1), targets.flatten())


# ---- one rank ----


class Batch:
    def __init__(self, preset: Preset) -> None:
        import torch

        torch.set_num_threads(1)
        generator = torch.Generator().manual_seed(2)
        shape, high = (preset.batch, preset.tokens), preset.vocabulary
        self.inputs = torch.randint(high, shape, generator=generator)
        self.targets = torch.randint(high, shape, generator=generator)


class TorchRank:
    """A rank of torch's pipeline, in a separate process that runs steps on request."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        command = [
            sys.executable, __file__, "--serve-torch", "--preset", arguments.preset,
            "--microbatches", str(arguments.microbatches),
        ]  # fmt: skip
        environment = {
            **os.environ,
            "MASTER_PORT": os.environ["TORCH_RANKS_PORT"],
            "TORCHELASTIC_USE_AGENT_STORE": "False",
        }
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, text=True, env=environment
        )

    def ask(self, *words: str) -> float:
        """Request a schedule's stages or a step; return the process's CPU time in seconds."""
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(" ".join(words) + "\n")
        self._process.stdin.flush()
        return float(self._process.stdout.readline())

    def close(self) -> None:
        self._process.communicate(timeout=60)
        assert self._process.returncode == 0, self._process.returncode


def serve_torch(arguments: argparse.Namespace) -> None:
    import torch.distributed as torch_dist

    from echelon.dist.pipeline import schedule

    preset, step = PRESETS[arguments.preset], None
    batch = Batch(preset)
    torch_dist.init_process_group("gloo")
    for line in sys.stdin:
        before = time.process_time()
        if line.startswith("make"):
            name = line.split()[1]
            chunks, torch_name = CASES[name]
            plan = schedule(name, RANKS, arguments.microbatches, chunks if chunks > 1 else None)
            step = theirs(preset, batch, torch_name, plan, plan.stages_of(torch_dist.get_rank()))
        assert step is not None
        step()
        print(time.process_time() - before, flush=True)
    torch_dist.destroy_process_group()


def theirs(
    preset: Preset, batch: Batch, name: str, plan: Any, mine: tuple[int, ...]
) -> Callable[[], Any]:
    import torch
    from torch.distributed import pipelining
    from torch.distributed.pipelining import schedules

    modules = stages_of(preset, plan.num_stages, mine)
    owner = dict(enumerate(plan.rank_of_stage))
    stages = []
    for index, module in modules.items():
        stage = pipelining.PipelineStage(module, index, plan.num_stages, torch.device("cpu"))
        stage.stage_index_to_group_rank = owner
        stages.append(stage)
    made = getattr(schedules, name)(
        stages[0] if len(stages) == 1 else stages, plan.num_microbatches, loss_fn=loss_fn
    )
    first, last = 0 in mine, plan.num_stages - 1 in mine

    def step() -> None:
        arguments = [batch.inputs] if first else []
        options: dict[str, Any] = {"losses": [], "target": batch.targets} if last else {}
        made.step(*arguments, **options)
        clear(modules.values())

    return step


class Rank:
    def __init__(self, arguments: argparse.Namespace) -> None:
        import echelon.dist as dist

        self.preset = PRESETS[arguments.preset]
        self.num_microbatches = arguments.microbatches
        self.rounds = arguments.rounds
        self.torch = TorchRank(arguments)
        self.groups = {"shm": dist.init(backend="shm")}
        self.groups["gloo"] = gloo_group(self.groups["shm"])
        self.world = self.groups["shm"]
        batch = Batch(self.preset)
        self.inputs, self.targets = batch.inputs, batch.targets

    def run(self, name: str) -> dict[str, Any]:
        from echelon.dist.pipeline import schedule

        chunks, _ = CASES[name]
        plan = schedule(name, RANKS, self.num_microbatches, chunks if chunks > 1 else None)
        mine = plan.stages_of(self.world.rank)
        ways: dict[str, Callable[[], Any]] = {
            backend: self.ours(plan, mine, group) for backend, group in self.groups.items()
        }
        self.torch.ask("make", name)
        ways["torch"] = lambda: self.torch.ask("step")
        for way in ways.values():
            way()  # warm
        times: dict[str, list[float]] = {way: [] for way in ways}
        cpu: dict[str, list[float]] = {way: [] for way in ways}
        for number in range(self.rounds):
            order = list(ways)[number % len(ways) :] + list(ways)[: number % len(ways)]
            for way in order:
                wall, processor = self.timed(ways[way])
                times[way].append(wall)
                cpu[way].append(processor)
        costs = self.costs(plan, mine)
        simulated = self.simulated(plan, costs)
        return {"times": times, "cpu": cpu, "costs": costs, "simulated": simulated}

    def timed(self, call: Callable[[], Any]) -> tuple[float, float]:
        """Return the slowest rank's time and the CPU time of all ranks, in seconds."""
        self.world.barrier()
        began, before = time.perf_counter(), time.process_time()
        elsewhere = call() or 0.0
        wall, processor = time.perf_counter() - began, time.process_time() - before + elsewhere
        each = self.world.all_gather_object([wall, processor])
        return max(one[0] for one in each), sum(one[1] for one in each)

    def ours(self, plan: Any, mine: tuple[int, ...], group: Any) -> Callable[[], Any]:
        from echelon.dist.pipeline import Pipeline, Stage

        modules = stages_of(self.preset, plan.num_stages, mine)
        stages = [Stage(m, index=i, num_stages=plan.num_stages) for i, m in modules.items()]
        pipe = Pipeline(stages, group=group, schedule=plan, loss_fn=loss_fn)

        def step() -> None:
            pipe.step(self.inputs, self.targets)
            clear(modules.values())

        return step

    # ---- costs ----

    def costs(self, plan: Any, mine: tuple[int, ...]) -> dict[str, Any]:
        """Measure every stage's computations, on all ranks at the same time, and the link."""
        own = {}
        for index, module in stages_of(self.preset, plan.num_stages, mine).items():
            own[index] = self.stage_costs(index, module, plan.num_stages)
        merged = {k: v for part in self.world.all_gather_object(
            [[index, *costs] for index, costs in own.items()]) for k, *v in part}  # fmt: skip
        columns = list(zip(*(merged[index] for index in range(plan.num_stages)), strict=True))
        names = ("forward", "input_grad", "weight_grad", "backward")
        return dict(zip(names, columns, strict=True)) | {"latency": self.latency()}

    def stage_costs(self, index: int, module: Any, num_stages: int) -> list[float]:
        import torch

        from echelon.dist.pipeline import Stage

        stage = Stage(module, index=index, num_stages=num_stages)
        size = self.preset.batch // self.num_microbatches
        x = self.inputs[:size] if stage.is_first else torch.randn(
            size, self.preset.tokens, self.preset.width)  # fmt: skip
        samples: list[list[float]] = [[], [], [], []]
        for _ in range(1 + max(3, self.rounds)):
            forward, whole = self.once(stage, x, is_split=False)
            forward_again, inputs, weights = self.once(stage, x, is_split=True)
            for sample, value in zip(
                samples, ((forward + forward_again) / 2, inputs, weights, whole), strict=True
            ):
                sample.append(value)
        return [statistics.median(sample[1:]) for sample in samples]

    def once(self, stage: Any, x: Any, *, is_split: bool) -> list[float]:
        import torch

        leaf = x.detach().requires_grad_(x.is_floating_point())
        ticks = [time.perf_counter()]
        output = stage.module(leaf)
        if stage.is_last:
            output = loss_fn(output, self.targets[: len(x)])
        stage.keep(0, [leaf], output)
        gradients = [torch.ones_like(output)]
        ticks.append(time.perf_counter())
        if is_split:
            stage.input_half(0, gradients)
            ticks.append(time.perf_counter())
            stage.weight_half(0)
        else:
            stage.backward(0, gradients)
        ticks.append(time.perf_counter())
        return [after - before for before, after in itertools.pairwise(ticks)]

    def latency(self) -> float:
        """Return the time to send one activation to the other rank: half a round trip."""
        import torch

        size = self.preset.batch // self.num_microbatches
        x = torch.zeros(size, self.preset.tokens, self.preset.width)
        group, peer = self.world, 1 - self.world.rank
        samples = []
        for _ in range(10):
            began = time.perf_counter()
            if group.rank == 0:
                group.send(x, peer)
                group.recv(x, peer)
            else:
                group.recv(x, peer)
                group.send(x, peer)
            samples.append((time.perf_counter() - began) / 2)
        return statistics.median(samples)

    def simulated(self, plan: Any, costs: dict[str, Any]) -> float:
        from echelon.dist.pipeline import Costs, simulate

        return simulate(plan, costs=Costs(**costs)).makespan


def gloo_group(world: Any) -> Any:
    """Create a gloo group beside the shm one; normally, a program has only one backend."""
    from echelon.dist.backends import registry
    from echelon.dist.backends.interface import Members
    from echelon.dist.backends.router import Router
    from echelon.dist.channel import ChannelTags
    from echelon.dist.group import ProcessGroup
    from echelon.dist.membership.environment import Rendezvous
    from echelon.store import PrefixStore, TCPStore

    members = Members(name="gloo", rank=world.rank, ranks=world.ranks)
    where = Rendezvous.from_environment()
    client = TCPStore(where.master_addr, where.master_port, is_master=False, wait_for_workers=False)
    store = PrefixStore("benchmark/gloo", client)
    backend = Router(members, store, registry.create("gloo", members, store, 60.0))
    channels = ChannelTags(PrefixStore("benchmark/channels", client), members.rank)
    return ProcessGroup(members, backend, 600.0, lambda *_: None, channels=channels)


def clear(modules: Any) -> None:
    for module in modules:
        for parameter in module.parameters():
            parameter.grad = None


# ---- the table ----


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--preset", choices=PRESETS, action="append")
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=CASES, action="append", help="schedules; 1f1b and "
                        "interleaved_1f1b if none is given")  # fmt: skip
    parser.add_argument("--json", type=Path, help="also write all samples here")
    parser.add_argument("--serve-torch", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--rank-output", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve_torch:
        arguments.preset = arguments.preset[0]
        serve_torch(arguments)
        return
    presets = arguments.preset or ["gpt", "thin"]
    names = arguments.only or list(CASES)[:2]
    if arguments.rank_output:
        arguments.preset = presets[0]
        rank = Rank(arguments)
        results = {name: rank.run(name) for name in names}
        if rank.world.rank == 0:
            arguments.rank_output.write_text(json.dumps(results))
        rank.torch.close()
        return
    everything: dict[str, dict[str, Any]] = {}
    for preset in presets:
        show_head(preset, arguments)
        for name in names:
            everything.setdefault(preset, {}).update(launch(arguments, preset, [name]))
            show_row(name, everything[preset][name])
    load_1, load_5, _ = os.getloadavg()
    print(f"\nload at the end: {load_1:.1f} (1 min), {load_5:.1f} (5 min)")
    if arguments.json:
        arguments.json.write_text(json.dumps(everything, indent=1))


def launch(arguments: argparse.Namespace, preset: str, names: list[str]) -> dict[str, Any]:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "results.json")
        command = [
            sys.executable, "-m", "echelon", "run", "--nproc-per-node", str(RANKS),
            "--run-dir", str(Path(folder, "run")), "--stall-timeout", "600", __file__,
            "--preset", preset, "--microbatches", str(arguments.microbatches),
            "--rounds", str(arguments.rounds), "--rank-output", str(output),
            *[word for name in names for word in ("--only", name)],
        ]  # fmt: skip
        environment = {
            **os.environ, "OMP_NUM_THREADS": "1", "TORCH_RANKS_PORT": str(free_port())
        }  # fmt: skip
        done = subprocess.run(command, env=environment, check=False, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(done.stdout[-2000:] + done.stderr[-4000:])
        return json.loads(output.read_text())


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def show_head(preset: str, arguments: argparse.Namespace) -> None:
    print(f"\n{preset}: {PRESETS[preset]}, {arguments.microbatches} micro-batches, "
          f"{arguments.rounds} rounds, medians")  # fmt: skip
    print("| schedule | torch, gloo (ms) | echelon, shm | x torch | echelon, gloo | x torch "
          "| simulated | shm / simulated | processor, shm x torch | gloo x torch |")  # fmt: skip
    print("|---|" + "---|" * 9, flush=True)


def show_row(name: str, result: dict[str, Any]) -> None:
    times, cpu = result["times"], result["cpu"]
    ms = {way: 1000 * statistics.median(samples) for way, samples in times.items()}
    cells = [name, f"{ms['torch']:.0f}"]
    for way in ("shm", "gloo"):
        cells += [f"{ms[way]:.0f}", f"{median_ratio(times[way], times['torch']):.2f}"]
    simulated = 1000 * result["simulated"]
    cells += [f"{simulated:.0f}", f"{ms['shm'] / simulated:.2f}"]
    cells += [f"{median_ratio(cpu[way], cpu['torch']):.2f}" for way in ("shm", "gloo")]
    print("| " + " | ".join(cells) + " |", flush=True)


def median_ratio(ours: list[float], theirs: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


if __name__ == "__main__":
    main()
