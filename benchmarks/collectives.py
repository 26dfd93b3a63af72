"""Collectives, measured against the libraries that people use: interleaved, medians, ratios.

    python benchmarks/collectives.py --ranks 2 --backends shm,gloo,mpich,xccl
    python benchmarks/collectives.py --ranks 4 --neighbours 2 --sizes 8,1048576
    python benchmarks/collectives.py --ranks 4 --hosts 2 --backends shm+gloo,flat,gloo   # as root
    python benchmarks/collectives.py --ranks 2 --overlap

All libraries run in the same rank processes; every round measures each of them once, so that a
slow moment of the machine meets them all. MPICH joins in if `mpi4py` can be imported (start with
`--mpi-python` naming an environment that has `mpich` and `mpi4py`); its ranks are then a second set
of processes that sleep on a pipe while the others run. "x" is times faster than Gloo in the same
run; GB/s is bus bandwidth as nccl-tests defines it; "of copy" is the share of what a plain copy of
the same size reaches with all ranks at it at once, at one read and one write a byte.

With `--hosts` the ranks run in as many network namespaces on one bridge; "flat" is our gloo backend
without levels. With `--overlap` each sample is 4 x 16 MB asynchronous all_reduce beside matrix
products on the main thread: what it takes beyond the products alone.
"""

# ruff: noqa: D102, D103 -- three libraries answer to the same five names; main() reads top-down
from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

SIZES = (8, 65536, 1 << 20, 16 << 20, 64 << 20)
_BUS = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "broadcast": lambda _: 1.0,
    "all_to_all": lambda n: (n - 1) / n,
}
_MAX_SAMPLE_S = 0.3


def operations(group: Any, size: int, num_bytes: int, dtype: str) -> dict[str, Callable[[], Any]]:
    """Return the calls to be measured; `num_bytes` is that of the whole, larger array."""
    import ml_dtypes

    kind = np.dtype(ml_dtypes.bfloat16) if dtype == "bfloat16" else np.dtype(dtype)
    count = max(size, num_bytes // kind.itemsize // size * size)
    whole, other = np.ones(count, kind), np.ones(count, kind)
    part = np.ones(count // size, kind)
    return {
        "all_reduce": lambda: group.all_reduce(whole, "max"),  # "max" keeps the values in range
        "all_gather": lambda: group.all_gather(whole, part),
        "reduce_scatter": lambda: group.reduce_scatter(part, whole, "max"),
        "broadcast": lambda: group.broadcast(whole, 0),
        "all_to_all": lambda: group.all_to_all(other, whole),
    }


class Mpi:
    """MPI in place of a group: buffers by pointer, no copies of its own."""

    def __init__(self) -> None:
        from mpi4py import MPI

        self._mpi = MPI
        self._world = MPI.COMM_WORLD
        self._types = {"float32": MPI.FLOAT, "float64": MPI.DOUBLE}

    @property
    def rank(self) -> int:
        return int(self._world.Get_rank())

    def _typed(self, x: Any) -> Any:
        return [x, self._types[x.dtype.name]]

    def all_reduce(self, x: Any, op: str) -> None:
        self._world.Allreduce(self._mpi.IN_PLACE, self._typed(x), getattr(self._mpi, op.upper()))

    def all_gather(self, out: Any, x: Any) -> None:
        self._world.Allgather(self._typed(x), self._typed(out))

    def reduce_scatter(self, out: Any, x: Any, op: str) -> None:
        self._world.Reduce_scatter_block(
            self._typed(x), self._typed(out), getattr(self._mpi, op.upper())
        )

    def broadcast(self, x: Any, root: int) -> None:
        self._world.Bcast(self._typed(x), root)

    def all_to_all(self, out: Any, x: Any) -> None:
        self._world.Alltoall(self._typed(x), self._typed(out))

    def barrier(self) -> None:
        self._world.Barrier()


class Gloo:
    """Gloo as torch users call it, without what our group adds."""

    def __init__(self) -> None:
        import torch
        import torch.distributed as torch_dist

        self._torch, self._dist = torch, torch_dist

    def _tensor(self, x: Any) -> Any:
        if x.dtype.name == "bfloat16":
            return self._torch.from_numpy(x.view(np.int16)).view(self._torch.bfloat16)
        return self._torch.from_numpy(x)

    def all_reduce(self, x: Any, op: str) -> None:
        self._dist.all_reduce(self._tensor(x), getattr(self._dist.ReduceOp, op.upper()))

    def all_gather(self, out: Any, x: Any) -> None:
        self._dist.all_gather_into_tensor(self._tensor(out), self._tensor(x))

    def reduce_scatter(self, out: Any, x: Any, op: str) -> None:
        self._dist.reduce_scatter_tensor(
            self._tensor(out), self._tensor(x), getattr(self._dist.ReduceOp, op.upper())
        )

    def broadcast(self, x: Any, root: int) -> None:
        self._dist.broadcast(self._tensor(x), root)

    def all_to_all(self, out: Any, x: Any) -> None:
        self._dist.all_to_all_single(self._tensor(out), self._tensor(x))

    def barrier(self) -> None:
        self._dist.barrier()

    def start_all_reduce(self, x: Any) -> Any:
        return self._dist.all_reduce(self._tensor(x), self._dist.ReduceOp.MAX, async_op=True)


class Ours:
    """A group of ours, with the one call more that the overlap takes."""

    def __init__(self, group: Any) -> None:
        self._group = group

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)

    def start_all_reduce(self, x: Any) -> Any:
        return self._group.all_reduce(x, "max", async_op=True)


def overlapped(group: Any, start: Callable[[Any], Any]) -> float:
    """Return the seconds that 4 x 16 MB asynchronous all_reduce add to a computation."""
    arrays = [np.ones(4 << 20, np.float32) for _ in range(4)]
    left, right = np.ones((600, 600), np.float32), np.ones((600, 600), np.float32)

    def compute() -> float:
        group.barrier()
        begun = time.perf_counter()
        for _ in range(20):
            np.matmul(left, right)
        return begun

    alone = -compute() + time.perf_counter()
    for warm_up in (True, False):
        group.barrier()
        begun = time.perf_counter()
        works = [start(x) for x in arrays]
        for _ in range(20):
            np.matmul(left, right)
        for work in works:
            work.wait()
        took = time.perf_counter() - begun
        if warm_up:
            alone = min(alone, -compute() + time.perf_counter())
    return max(took - alone, 0.0)


def sample(call: Callable[[], Any], barrier: Callable[[], Any], repeats: int) -> float:
    """Return seconds a call, over `repeats` of them after a barrier."""
    barrier()
    begun = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - begun) / repeats


def repeats_of(num_bytes: int) -> int:
    return max(2, min(200, (8 << 20) // max(num_bytes, 1)))


def serve(group: Any, size: int) -> None:
    """Answer the driver: a line of JSON asks for one sample, a line of JSON answers."""
    calls: dict[tuple[int, str], dict[str, Callable[[], Any]]] = {}
    for line in sys.stdin:
        ask = json.loads(line)
        if ask["operation"] == "copy":
            took = copy_seconds(ask["num_bytes"], group.barrier)
        elif ask["operation"] == "overlap":
            took = overlapped(group, group.start_all_reduce)
        else:
            key = (ask["num_bytes"], ask["dtype"])
            if key not in calls:
                calls.clear()
                calls[key] = operations(group, size, *key)
            call = calls[key][ask["operation"]]
            call()
            took = sample(call, group.barrier, repeats_of(ask["num_bytes"]))
        print(json.dumps(took), flush=True)


def copy_seconds(num_bytes: int, barrier: Callable[[], Any]) -> float:
    a, b = np.ones(max(num_bytes, 8), np.uint8), np.ones(max(num_bytes, 8), np.uint8)
    np.copyto(b, a)
    return sample(lambda: np.copyto(b, a), barrier, repeats_of(num_bytes))


def rank_main(library: str, size: int) -> None:
    if library == "mpich":
        serve(Mpi(), size)
        return
    if library == "gloo":
        import torch.distributed as torch_dist

        torch_dist.init_process_group("gloo")
        serve(Gloo(), size)
        return
    import echelon.dist as dist

    backend = {"native": "shm", "python": "shm", "flat": "gloo"}.get(library, library)
    serve(Ours(dist.init(backend, timeout_s=120)), size)
    dist.shutdown()


class Team:
    """The rank processes of one library."""

    def __init__(self, library: str, size: int, mpi_python: str | None, places: list[Any]) -> None:
        self.library = library
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        env = {
            **os.environ, "MASTER_PORT": str(port),
            "MASTER_ADDR": places[0].address if places else "127.0.0.1",
            "WORLD_SIZE": str(size), "OMP_NUM_THREADS": "1", "ECHELON_RECORDER_SIZE": "0",
            "PYTHONWARNINGS": "ignore",
        }  # fmt: skip
        if library in ("native", "python"):
            env["ECHELON_SHM"] = library
        if places:
            env["GLOO_SOCKET_IFNAME"] = "eth0"  # torch's Gloo would ask for the host's name
        python = mpi_python if library == "mpich" else sys.executable
        command = [str(python), __file__, "--rank-of", library, "--ranks", str(size)]
        if library == "mpich":
            env |= {"PMI_SIZE": str(size)}
        self.ranks = []
        if library == "mpich":
            self.ranks = start_mpi(command, size, env)
            return
        for rank in range(size):
            place = places[rank * len(places) // size] if places else None
            there = place.command(*command) if place else command
            self.ranks.append(start(there, {**env, "RANK": str(rank), "LOCAL_RANK": str(rank)}))

    def ask(self, operation: str, num_bytes: int, dtype: str) -> float:
        """Take one sample on all ranks; the slowest counts."""
        line = json.dumps({"operation": operation, "num_bytes": num_bytes, "dtype": dtype})
        for rank in self.ranks:
            rank.stdin.write(line + "\n")
            rank.stdin.flush()
        return max(json.loads(rank.stdout.readline()) for rank in self.ranks)

    def close(self) -> None:
        for rank in self.ranks:
            rank.stdin.close()
        for rank in self.ranks:
            with contextlib.suppress(subprocess.TimeoutExpired):
                rank.wait(10)
            rank.kill()


def start(command: list[str], env: dict[str, str]) -> Any:
    return subprocess.Popen(
        command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


class _Channel:
    """One MPI rank: mpiexec gives no pipe to each, so each opens a FIFO pair of its own."""

    def __init__(self, folder: str, rank: int, job: Any) -> None:
        self._job = job
        self.stdin = open(f"{folder}/{rank}.in", "w")  # noqa: SIM115, PTH123
        self.stdout = open(f"{folder}/{rank}.out")  # noqa: SIM115, PTH123

    def wait(self, timeout_s: float) -> None:
        self._job.wait(timeout_s)

    def kill(self) -> None:
        self._job.kill()


def start_mpi(command: list[str], size: int, env: dict[str, str]) -> list[Any]:
    import tempfile

    folder = tempfile.mkdtemp()
    for rank in range(size):
        for end in ("in", "out"):
            os.mkfifo(f"{folder}/{rank}.{end}")
    mpiexec = os.path.join(os.path.dirname(command[0]), "mpiexec")  # noqa: PTH118, PTH120
    job = subprocess.Popen(
        [mpiexec, "-n", str(size), *command, "--fifos", folder], env=env, stdin=subprocess.DEVNULL
    )
    return [_Channel(folder, rank, job) for rank in range(size)]


@contextlib.contextmanager
def neighbours(count: int) -> Iterator[None]:
    """Keep `count` other processes busy."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for one in busy:
            one.kill()
            one.wait()


@contextlib.contextmanager
def network(count: int) -> Iterator[list[Any]]:
    """Make `count` hosts out of network namespaces; none if it is 0."""
    if not count:
        yield []
        return
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from tests.hosts import hosts

    with hosts(count) as places:
        yield places


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    with network(options.hosts) as places:
        return measure_on(places, options)


def measure_on(places: list[Any], options: argparse.Namespace) -> list[dict[str, Any]]:
    teams = [Team(name, options.ranks, options.mpi_python, places) for name in options.backends]
    rows = []
    try:
        with neighbours(options.neighbours):
            if options.overlap:
                return [measure_overlap(teams, options)]
            for dtype in options.dtypes:
                for num_bytes in options.sizes:
                    for operation in options.operations:
                        row = measure_one(teams, operation, num_bytes, dtype, options)
                        rows.append(row)
                        print(render(row), flush=True)
    finally:
        for team in teams:
            team.close()
    return rows


def measure_one(
    teams: list[Team], operation: str, num_bytes: int, dtype: str, options: argparse.Namespace
) -> dict[str, Any]:
    usable = [t for t in teams if not (t.library == "mpich" and dtype == "bfloat16")]
    samples: dict[str, list[float]] = {team.library: [] for team in usable}
    copies = []
    for turn in range(options.rounds):
        for team in usable[turn % len(usable) :] + usable[: turn % len(usable)]:
            samples[team.library].append(team.ask(operation, num_bytes, dtype))
        copies.append(usable[0].ask("copy", num_bytes, dtype))
    return {
        "ranks": options.ranks, "neighbours": options.neighbours, "operation": operation,
        "dtype": dtype, "num_bytes": num_bytes, "copy_s": statistics.median(copies),
        "seconds": {name: statistics.median(times) for name, times in samples.items()},
    }  # fmt: skip


def measure_overlap(teams: list[Team], options: argparse.Namespace) -> dict[str, Any]:
    samples: dict[str, list[float]] = {team.library: [] for team in teams}
    for turn in range(options.rounds):
        for team in teams[turn % len(teams) :] + teams[: turn % len(teams)]:
            samples[team.library].append(team.ask("overlap", 0, "float32"))
    seconds = {name: statistics.median(times) for name, times in samples.items()}
    shown = " | ".join(f"{name} {exposed * 1e3:.1f} ms" for name, exposed in seconds.items())
    print(f"{options.ranks} exposed beside a computation, 4 x 16 MB: {shown}", flush=True)
    return {"ranks": options.ranks, "operation": "overlap", "seconds": seconds}


def render(row: dict[str, Any]) -> str:
    gloo = row["seconds"].get("gloo")
    factor = _BUS[row["operation"]](row["ranks"])
    cells = []
    for name, seconds in row["seconds"].items():
        ratio = f" x{gloo / seconds:.1f}" if gloo and name != "gloo" else ""
        speed = row["num_bytes"] * factor / seconds / 1e9
        cells.append(f"{name} {seconds * 1e6:.0f} us {speed:.2f} GB/s{ratio}")
    first = next(iter(row["seconds"].values()))
    head = f"{row['ranks']} {row['operation']} {row['dtype']} {row['num_bytes']}"
    return f"{head}: " + " | ".join(cells) + f" | of copy {row['copy_s'] / first:.0%}"


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--backends", type=lambda text: text.split(","), default=["native", "gloo"],
                        help="of native, python, gloo, mpich, xccl, shm+gloo, flat")  # fmt: skip
    parser.add_argument("--sizes", type=lambda t: [int(s) for s in t.split(",")], default=SIZES)
    parser.add_argument("--dtypes", type=lambda text: text.split(","), default=["float32"])
    parser.add_argument("--operations", type=lambda text: text.split(","), default=list(_BUS))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--neighbours", type=int, default=0)
    parser.add_argument("--hosts", type=int, default=0, help="network namespaces; needs root")
    parser.add_argument("--overlap", action="store_true", help="measure that and nothing else")
    parser.add_argument("--mpi-python")
    parser.add_argument("--json")
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)
    parser.add_argument("--fifos", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main() -> None:
    options = parse()
    if options.rank_of:
        if options.fifos:
            rank = Mpi().rank
            sys.stdin = open(f"{options.fifos}/{rank}.in")  # noqa: SIM115, PTH123
            sys.stdout = open(f"{options.fifos}/{rank}.out", "w")  # noqa: SIM115, PTH123
        else:
            sys.stdout = os.fdopen(os.dup(1), "w")
            os.dup2(2, 1)  # libraries print to the descriptor too
        rank_main(options.rank_of, options.ranks)
        return
    rows = measure(options)
    if options.json:
        with open(options.json, "w") as file:  # noqa: PTH123
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()
