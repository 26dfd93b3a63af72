"""Compare sharded training with torch's FSDP2 and DDP over Gloo: step time, CPU time, memory.

    python -m benchmarks.sharding.run   # the tables and the plot's data
    python -m benchmarks.sharding.run --sizes 10M --ranks 2 --rounds 5
    python -m benchmarks.sharding.run --mixed-precision bf16 --contenders echelon,fsdp2,ddp,alone
    python -m benchmarks.sharding.run --mixed-precision bf16 --accumulate 4
    python -m benchmarks.sharding.run --link 60   # MB/s between hosts, as root
    python -m benchmarks.sharding.run --plot docs/images/sharding-memory.svg  # memory by ranks
    python -m benchmarks.sharding.run --compile   # blocks against the whole model

The contenders train the same char GPT on the same data. Each rank of each contender is a fresh
process. Once all are ready, the contenders take one step in turn, so that a slow moment of the
machine affects them all. A step is everything from `zero_grad` to `optimizer.step()`, and takes as
long as its slowest rank. The table shows the best and median step, CPU seconds per step and rank
(all threads, at the best step), and peak resident memory of the largest rank. "alone" is the same
computation in as many independent processes at the same time; sharding cannot be faster.

With `--accumulate N`, a step consists of N full-size micro-batches, whose gradients are summed and
reduced once, with the last one.

With `--link`, every rank is a host of its own (a network namespace), whose sending rate is limited
by a token bucket. "compute" is the time of a step of the same ranks without communication, and
"link" is the time to send a rank's bytes at that rate. The bound is the greater of the two.
"""

# ruff: noqa: D102, D103 -- three contenders answer to the same names; main() reads top-down
from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.runner.place import child_environ
from benchmarks.sharding.model import SIZES, Size, make_batch, make_model

CONTENDERS = ("echelon", "fsdp2", "ddp")


class Training(NamedTuple):
    """Options of all contenders: the 16-bit compute dtype and the micro-batches per step."""

    precision: str = ""
    num_micro: int = 1

    def arguments(self) -> list[str]:
        precision = ["--mixed-precision", self.precision] if self.precision else []
        return [*precision, "--accumulate", str(self.num_micro)]


_PLAIN = Training()


# ---- the contenders ----


def wrap(contender: str, model: Any, precision: str) -> Any:
    """Join the contender's world and wrap the model."""
    import torch

    dtypes = {}
    if precision:
        dtypes = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
    if contender == "echelon":
        import echelon.dist as dist
        from echelon.dist.fsdp import MixedPrecisionPolicy, fully_shard

        dist.init()
        for block in model.blocks:
            fully_shard(block, mp_policy=MixedPrecisionPolicy(**dtypes))
        return fully_shard(model, mp_policy=MixedPrecisionPolicy(**dtypes))
    if contender == "alone":
        return model
    import torch.distributed as torch_dist

    torch_dist.init_process_group(
        "gloo",
        init_method=os.environ["BENCH_INIT"],
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
    )
    if contender == "ddp":
        from torch.nn.parallel import DistributedDataParallel

        return DistributedDataParallel(model)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy
    from torch.distributed.fsdp import fully_shard as torch_fully_shard

    mesh = init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),))
    for block in model.blocks:
        torch_fully_shard(block, mesh=mesh, mp_policy=MixedPrecisionPolicy(**dtypes))
    return torch_fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(**dtypes))


def train_step(contender: str, model: Any, batches: list[tuple[Any, Any]], *, casts: bool) -> float:
    """Take one step over all micro-batches, reducing with the last one; return its loss."""
    import torch
    from torch.nn import functional

    for number, (ids, targets) in enumerate(batches, 1):
        is_last = number == len(batches)
        if contender == "echelon":
            from echelon.dist.fsdp import set_requires_gradient_sync

            set_requires_gradient_sync(model, is_last)
        elif contender == "fsdp2":
            model.set_requires_gradient_sync(is_last)
        keeps = contender == "ddp" and not is_last
        with model.no_sync() if keeps else contextlib.nullcontext():
            with torch.autocast("cpu", torch.bfloat16, enabled=casts):
                logits = model(ids)
            loss = functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
            (loss / len(batches)).backward()
    return float(loss.item())


def serve(contender: str, size: Size, training: Training) -> None:
    """Run as one rank: take a step for every line on standard input."""
    import torch

    torch.set_num_threads(1)
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    imported = _peak_mib()
    model = wrap(contender, make_model(size), training.precision)
    # Who does not shard has autocast instead.
    casts = bool(training.precision) and contender in ("ddp", "alone")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    for step, _ in enumerate(sys.stdin):
        batches = [
            make_batch(size, step * training.num_micro + number, rank, ranks)
            for number in range(training.num_micro)
        ]
        start, cpu = time.perf_counter(), time.process_time()
        optimizer.zero_grad()
        loss = train_step(contender, model, batches, casts=casts)
        optimizer.step()
        answer = {
            "wall_s": time.perf_counter() - start,
            "cpu_s": time.process_time() - cpu,
            "loss": loss,
            "peak_mib": _peak_mib(),
            "imported_mib": imported,
        }
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


def _peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


# ---- running them ----


class Team:
    """The rank processes of one contender."""

    def __init__(
        self,
        contender: str,
        size_name: str,
        environ: list[dict[str, str]],
        prefixes: list[list[str]],
        training: Training,
    ) -> None:
        self.contender = contender
        self.steps: list[dict[str, Any]] = []
        self._processes = [
            subprocess.Popen(
                [*prefix, sys.executable, __file__, "--serve", contender, "--sizes", size_name,
                 *training.arguments()],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                env=child_environ(OMP_NUM_THREADS="1", **one),
            )
            for one, prefix in zip(environ, prefixes, strict=True)
        ]  # fmt: skip

    def wait_until_ready(self) -> None:
        for process in self._processes:
            line = process.stdout.readline()  # type: ignore[union-attr]
            if line != "ready\n":
                raise SystemExit(f"a rank of {self.contender} said {line!r} and not 'ready'")

    def step(self) -> None:
        for process in self._processes:
            process.stdin.write("step\n")  # type: ignore[union-attr]
            process.stdin.flush()  # type: ignore[union-attr]
        answers = [self._answer(process) for process in self._processes]
        self.steps.append(
            {
                "wall_s": max(answer["wall_s"] for answer in answers),
                "cpu_s": statistics.mean(answer["cpu_s"] for answer in answers),
                "loss": statistics.mean(answer["loss"] for answer in answers),
                "peak_mib": max(answer["peak_mib"] for answer in answers),
                "imported_mib": max(answer["imported_mib"] for answer in answers),
            }
        )

    def _answer(self, process: subprocess.Popen[str]) -> dict[str, Any]:
        line = process.stdout.readline()  # type: ignore[union-attr]
        if not line:
            code = process.wait(30)
            raise SystemExit(f"a rank of {self.contender} ended with {code} (-9: out of memory?)")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        for process in self._processes:
            with contextlib.suppress(OSError):
                process.stdin.close()  # type: ignore[union-attr]
        for process in self._processes:
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            process.stdout.close()  # type: ignore[union-attr]

    def summary(self) -> dict[str, float]:
        timed = self.steps[1:] or self.steps  # the first one allocates
        best = min(timed, key=lambda one: one["wall_s"])
        return {
            "best_s": best["wall_s"],
            "median_s": statistics.median(one["wall_s"] for one in timed),
            "cpu_s": min(one["cpu_s"] for one in timed),
            "peak_mib": self.steps[-1]["peak_mib"],
            "imported_mib": self.steps[-1]["imported_mib"],
            "loss": self.steps[-1]["loss"],
        }


@contextlib.contextmanager
def team(
    contender: str, size: str, ranks: int, training: Training, hosts: list[Any] | None = None
) -> Iterator[Team]:
    from echelon.store import StoreServer

    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        environ = {"WORLD_SIZE": str(ranks), "BENCH_INIT": f"file://{folder}/init"}
        prefixes: list[list[str]] = [[] for _ in range(ranks)]
        if hosts is None:
            server = StoreServer("127.0.0.1", 0)
            server.start()
            stack.callback(server.close)
            environ |= {
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(server.port),
                "TORCHELASTIC_USE_AGENT_STORE": "True",
            }
        else:
            prefixes = [host.command() for host in hosts]
            port = _start_store(stack, hosts[0])
            environ |= {
                "MASTER_ADDR": hosts[0].address,
                "MASTER_PORT": port,
                "TORCHELASTIC_USE_AGENT_STORE": "True",
                "GLOO_SOCKET_IFNAME": "eth0",
            }
        each = [{**environ, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]
        result = Team(contender, size, each, prefixes, training)
        stack.callback(result.close)
        yield result


def _start_store(stack: contextlib.ExitStack, host: Any) -> str:
    process = subprocess.Popen(
        host.command(sys.executable, "-m", "echelon", "store", "--host", host.address,
                     "--port", "0"),
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip

    def end() -> None:
        process.stdin.close()  # type: ignore[union-attr]
        process.wait(10)
        process.stdout.close()  # type: ignore[union-attr]

    stack.callback(end)
    return process.stdout.readline().strip()  # type: ignore[union-attr]


def race(
    contenders: list[str],
    size: str,
    ranks: int,
    rounds: int,
    training: Training = _PLAIN,
    *,
    hosts: list[Any] | None = None,
) -> dict[str, dict[str, float]]:
    """Let the contenders take one step in turn, `rounds` times; return the measurements."""
    with contextlib.ExitStack() as stack:
        teams = []
        for one in contenders:
            teams.append(stack.enter_context(team(one, size, ranks, training, hosts)))
            teams[-1].wait_until_ready()
        for number in range(rounds + 1):
            for one in teams[number % len(teams) :] + teams[: number % len(teams)]:
                one.step()
        return {one.contender: one.summary() for one in teams}


# ---- tables ----


def show(size: str, ranks: int, result: dict[str, dict[str, float]]) -> None:
    peer = result.get("fsdp2", next(iter(result.values())))
    for contender, seen in result.items():
        times = {key: seen[key] / peer[key] for key in ("best_s", "median_s", "cpu_s", "peak_mib")}
        print(
            f"| {size}, {ranks} | {contender} | {seen['best_s']:.3f} / {seen['median_s']:.3f} "
            f"| {seen['cpu_s']:.3f} | {seen['peak_mib']:.0f} "
            f"| {times['best_s']:.2f} / {times['median_s']:.2f} | {times['cpu_s']:.2f} "
            f"| {times['peak_mib']:.2f} | {seen['loss']:.4f} |",
            flush=True,
        )


def show_heading() -> None:
    print(
        "| size, ranks | contender | step s, best / median | cpu s | peak MiB "
        "| x FSDP2: step | cpu | peak | loss |\n|---|---|---|---|---|---|---|---|---|"
    )


@contextlib.contextmanager
def throttled(count: int, mb_per_s: float) -> Iterator[list[Any]]:
    """Create hosts whose sending rate is limited."""
    from tests.support.hosts import hosts

    with hosts(count) as made:
        for host in made:
            limit = ["rate", f"{int(mb_per_s * 8000)}kbit", "burst", "256kb", "latency", "100ms"]
            command = host.command("tc", "qdisc", "add", "dev", "eth0", "root", "tbf", *limit)
            subprocess.run(command, check=True, timeout=20)
        yield made


def race_throttled(size: str, ranks: int, rounds: int, mb_per_s: float) -> None:
    """Print how close each contender comes to the greater of its compute and link times."""
    with throttled(ranks, mb_per_s) as hosts:
        result = race(["alone", "fsdp2", "echelon", "ddp"], size, ranks, rounds, hosts=hosts)
    num_bytes = 4 * sum(p.numel() for p in make_model(SIZES[size]).parameters())
    one_way_s = num_bytes * (ranks - 1) / ranks / (mb_per_s * 1e6)
    compute = result.pop("alone")
    for contender, seen in result.items():
        link_s = (2 if contender == "ddp" else 3) * one_way_s
        bounds = [max(compute[key], link_s) for key in ("best_s", "median_s")]
        print(
            f"| {size}, {ranks}, {mb_per_s:.0f} MB/s | {contender} "
            f"| {seen['best_s']:.2f} / {seen['median_s']:.2f} "
            f"| {compute['best_s']:.2f} / {compute['median_s']:.2f} | {link_s:.2f} "
            f"| {seen['best_s'] / bounds[0]:.2f} / {seen['median_s'] / bounds[1]:.2f} |",
            flush=True,
        )


def plot_memory(path: str, size: str, counts: list[int]) -> None:
    """Measure and plot peak memory by number of ranks, with a line for 16 bytes per parameter.

    Each run takes two steps, because the second step allocates as much as any later one.
    """
    from benchmarks.sharding import plot

    lines: dict[str, dict[int, float]] = {one: {} for one in CONTENDERS}
    formula = {}
    numel = sum(p.numel() for p in make_model(SIZES[size]).parameters())
    for ranks in counts:
        for contender in CONTENDERS:
            seen = race([contender], size, ranks, 1)[contender]
            lines[contender][ranks] = seen["peak_mib"]
            formula[ranks] = seen["imported_mib"] + 16 * numel / ranks / 2**20
        print(ranks, {name: round(line[ranks]) for name, line in lines.items()}, flush=True)
    title = f"Peak resident memory of a rank, {size} parameters, fp32 AdamW, MiB"
    labels = {"echelon": "fully_shard", "fsdp2": "FSDP2, Gloo", "ddp": "DDP, Gloo"}
    series = [(labels[name], line) for name, line in lines.items()]
    Path(path).write_text(plot.draw(title, "ranks", series, ("16 P / N", formula)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sizes", default="10M,85M")
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--contenders", default=",".join(CONTENDERS))
    parser.add_argument("--mixed-precision", choices=["bf16"], default="",
                        help="compute and gather in it, reduce in fp32")  # fmt: skip
    parser.add_argument("--accumulate", type=int, default=1, metavar="N",
                        help="micro-batches a step")  # fmt: skip
    parser.add_argument("--link", type=float, metavar="MB/S", help="limit what a rank sends")
    parser.add_argument("--plot", metavar="FILE", help="draw memory against ranks (SVG)")
    parser.add_argument("--compile", action="store_true", help="time cold starts")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    options = parser.parse_args()
    training = Training(options.mixed_precision, options.accumulate)
    if options.serve:
        serve(options.serve, SIZES[options.sizes], training)
        return
    counts = list(map(int, options.ranks.split(",")))
    if options.plot:
        plot_memory(options.plot, options.sizes.split(",")[-1], counts)
        return
    if options.compile:
        from benchmarks.sharding.compile import time_compilation

        time_compilation(options.sizes.split(",")[0])
        return
    if options.link:
        print(
            "| size, ranks, link | contender | step s, best / median | compute s | link s "
            "| x bound |\n|---|---|---|---|---|---|"
        )
        for size in options.sizes.split(","):
            for ranks in counts:
                race_throttled(size, ranks, options.rounds, options.link)
        return
    show_heading()
    for size in options.sizes.split(","):
        for ranks in counts:
            contenders = options.contenders.split(",")
            show(size, ranks, race(contenders, size, ranks, options.rounds, training))


if __name__ == "__main__":
    main()
