"""Compare collectives with commonly used libraries: interleaved samples, medians and ratios.

    python -m benchmarks.collectives.run --ranks 2 --backends native,python,gloo,mpich,xccl
    python -m benchmarks.collectives.run --ranks 4 --neighbors 2 --sizes 8,1048576
    python -m benchmarks.collectives.run --ranks 4 --hosts 2 --backends shm+gloo,flat,gloo  # root
    python -m benchmarks.collectives.run --ranks 2 --latency   # 4 bytes: blocking and not
    python -m benchmarks.collectives.run --ranks 2 --overlap
    python -m benchmarks.collectives.run --ranks 2 --backends native --against ../other-checkout

Every round takes one sample of each library, in rotating order, so that a slow moment of the
machine affects all of them. Every sample begins with a call whose result is checked on every rank;
a wrong result ends the benchmark. Sums of floats are the default, as in training; `_max` rows exist
for libraries whose maximum is faster or slower than their sum.

Echelon's backends are native and python (the two engines of `shm`), shm+gloo, flat (`gloo` without
levels) and xccl. NAME+recorder is the same backend with the recorder on. MPICH is included if
`mpi4py` can be imported (`--mpi-python` names an environment with `mpich` and `mpi4py`); its ranks
are separate processes, which block on a pipe while the others run.

"x" is the speedup over Gloo in the same run. GB/s is bus bandwidth as nccl-tests defines it. "of
bound" compares with the memory traffic that no algorithm can avoid: each input byte is read once
and each output byte is written once, at the speed at which all ranks at the same time read and
write as many bytes in NumPy. With `--against`, each of echelon's backends also runs from another
checkout (with its C core built), as "NAME before"; the last lines list each row in which this
checkout is slower.

With `--hosts`, the ranks run in that many network namespaces on one bridge. With `--overlap`, each
sample overlaps four asynchronous 16 MB all_reduces with matrix products on the main thread, and
measures the time beyond that of the products alone.
"""

# ruff: noqa: D102, D103 -- reads top-down
from __future__ import annotations

import argparse
import contextlib
import json
import os
import select
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.collectives.rank import LATENCY, OPERATIONS

SIZES = (8, 65536, 1 << 20, 16 << 20, 64 << 20)
_RANK_SCRIPT = Path(__file__).with_name("rank.py")
_BEFORE = " before"
_SLOWER = 1.05  # what counts as slower than another checkout, in the median of the rounds' ratios
_START_S = 120.0
_SAMPLE_S = 60.0
_BUS = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "broadcast": lambda _: 1.0,
    "all_to_all": lambda n: (n - 1) / n,
    "barrier": lambda _: 0.0,
}
# The least number of bytes that are read and written over all ranks, as a share of the traffic when
# each rank reads and writes the whole array once.
_TRAFFIC = {
    "all_reduce": lambda _: 1.0,
    "all_gather": lambda n: (n + 1) / (2 * n),
    "reduce_scatter": lambda n: (n + 1) / (2 * n),
    "broadcast": lambda _: 0.5,
    "all_to_all": lambda _: 1.0,
    "barrier": lambda _: 0.0,
}


class Rank:
    """One rank process, controlled through a pipe or a FIFO.

    A FIFO is opened for reading and writing, so that opening it does not block if the rank never
    starts. The end of the process is detected from `job`, not from the FIFO.
    """

    def __init__(
        self, name: str, job: subprocess.Popen[bytes], write_fd: int, read_fd: int
    ) -> None:
        self._name, self._job = name, job
        self._write_fd, self._read_fd = write_fd, read_fd
        self._unread = b""

    def tell(self, line: str) -> None:
        os.write(self._write_fd, line.encode() + b"\n")

    def hear(self, timeout_s: float) -> float:
        """Return the rank's answer; raise an exception if it exits or does not answer in time."""
        deadline_s = time.monotonic() + timeout_s
        while b"\n" not in self._unread:
            came = bool(select.select([self._read_fd], [], [], 0.2)[0])
            answer = os.read(self._read_fd, 4096) if came else b""
            self._unread += answer
            if not answer and (came or self._job.poll() is not None):
                raise RuntimeError(f"{self._name} ended with exit code {self._job.wait(10)}")
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"{self._name} has not answered for {timeout_s:.0f} s")
        line, self._unread = self._unread.split(b"\n", 1)
        return float(json.loads(line))

    def close(self) -> None:
        for fd in {self._write_fd, self._read_fd}:
            os.close(fd)

    def end(self) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._job.wait(10)
        self._job.kill()
        self._job.wait()


class Team:
    """The rank processes of one library."""

    def __init__(self, library: str, options: argparse.Namespace, places: list[Any]) -> None:
        self.library = library
        self._folder = tempfile.TemporaryDirectory(prefix="collectives-")
        self._is_fresh = True
        name = library.removesuffix(_BEFORE)
        env = self._environment(name, options, places)
        if library.endswith(_BEFORE):
            other = str(Path(options.against).resolve())
            env |= {"PYTHONPATH": other, "BENCHMARK_CHECKOUT": other}
        command = [str(_RANK_SCRIPT), name.split("+recorder")[0], str(options.ranks)]
        if library == "mpich":
            self.ranks = self._start_mpi([str(options.mpi_python or sys.executable), *command], env)
            return
        self.ranks = [
            self._start([sys.executable, *command], env, rank, places, options.ranks)
            for rank in range(options.ranks)
        ]

    def _environment(
        self, name: str, options: argparse.Namespace, places: list[Any]
    ) -> dict[str, str]:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        env = {
            **os.environ, "MASTER_PORT": str(port),
            "MASTER_ADDR": places[0].address if places else "127.0.0.1",
            "WORLD_SIZE": str(options.ranks), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore",
        }  # fmt: skip
        if name.endswith("+recorder"):
            env["LOCAL_WORLD_SIZE"] = str(options.ranks)
        else:
            env["ECHELON_RECORDER_SIZE"] = "0"
        engine = name.split("+")[0]
        if engine in ("native", "python"):
            env["ECHELON_SHM"] = engine
        if places:
            env["GLOO_SOCKET_IFNAME"] = "eth0"  # torch's Gloo would ask for the host's name
        return env

    def _start(
        self, command: list[str], env: dict[str, str], rank: int, places: list[Any], size: int
    ) -> Rank:
        place = places[rank * len(places) // size] if places else None
        folder = Path(self._folder.name, f"rank_{rank}")
        folder.mkdir()
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "ECHELON_RANK_DIR": str(folder)}
        job = subprocess.Popen(
            place.command(*command) if place else command,
            env={**env, **own}, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        assert job.stdin is not None
        assert job.stdout is not None
        ends = os.dup(job.stdin.fileno()), os.dup(job.stdout.fileno())
        job.stdin.close()
        job.stdout.close()
        return Rank(f"{self.library} rank {rank}", job, *ends)

    def _start_mpi(self, command: list[str], env: dict[str, str]) -> list[Rank]:
        """Start MPI's ranks, each with a pair of FIFOs, as mpiexec gives them no pipes."""
        folder, size = self._folder.name, int(command[-1])
        mpiexec = Path(command[0]).with_name("mpiexec")
        ends = []
        for rank in range(size):
            for end in ("in", "out"):
                os.mkfifo(f"{folder}/{rank}.{end}")
            ends.append([os.open(f"{folder}/{rank}.{end}", os.O_RDWR) for end in ("in", "out")])
        job = subprocess.Popen(
            [str(mpiexec), "-n", str(size), *command, "--fifos", folder],
            env={**env, "PMI_SIZE": str(size)}, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        return [Rank(f"mpich rank {rank}", job, *pair) for rank, pair in enumerate(ends)]

    def ask(self, operation: str, num_bytes: int, dtype: str) -> float:
        """Take one sample on all ranks; return the slowest rank's seconds per call."""
        line = json.dumps({"operation": operation, "num_bytes": num_bytes, "dtype": dtype})
        for rank in self.ranks:
            rank.tell(line)
        limit_s = _START_S if self._is_fresh else _SAMPLE_S
        self._is_fresh = False
        return max(rank.hear(limit_s) for rank in self.ranks)

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()
        for rank in self.ranks:
            rank.end()
        self._folder.cleanup()


@contextlib.contextmanager
def neighbors(count: int) -> Iterator[None]:
    """Run `count` busy processes while the context lasts."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for one in busy:
            one.kill()
            one.wait()


@contextlib.contextmanager
def network(count: int) -> Iterator[list[Any]]:
    """Create `count` hosts as network namespaces, or none if `count` is 0."""
    if not count:
        yield []
        return
    from tests.support.hosts import hosts

    with hosts(count) as places:
        yield places


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    with network(options.hosts) as places, contextlib.ExitStack() as stack:
        teams = []
        for name in libraries(options):
            teams.append(Team(name, options, places))
            stack.callback(teams[-1].close)
        stack.enter_context(neighbors(options.neighbors))
        if options.overlap:
            return [measure_overlap(teams, options)]
        rows = []
        for dtype in options.dtypes:
            for num_bytes in options.sizes:
                for operation in options.operations:
                    row = measure_one(teams, operation, num_bytes, dtype, options)
                    rows.append(row)
                    print(render(row), flush=True)
        return rows


def libraries(options: argparse.Namespace) -> list[str]:
    """Return the libraries to run; with `--against`, echelon's backends appear twice."""
    names = []
    for name in options.backends:
        names.append(name)
        if options.against and name not in ("gloo", "mpich"):
            names.append(name + _BEFORE)
    return names


def measure_one(
    teams: list[Team], operation: str, num_bytes: int, dtype: str, options: argparse.Namespace
) -> dict[str, Any]:
    usable = [t for t in teams if not (t.library == "mpich" and dtype == "bfloat16")]
    samples: dict[str, list[float]] = {team.library: [] for team in usable}
    touches = []
    for turn in range(options.rounds):
        for team in usable[turn % len(usable) :] + usable[: turn % len(usable)]:
            samples[team.library].append(team.ask(operation, num_bytes, dtype))
        touches.append(usable[0].ask("touch", num_bytes, dtype))
    return {
        "ranks": options.ranks, "neighbors": options.neighbors, "operation": operation,
        "dtype": dtype, "num_bytes": num_bytes, "touch_s": statistics.median(touches),
        "seconds": {name: statistics.median(times) for name, times in samples.items()},
        "against": against(samples),
    }  # fmt: skip


def against(samples: dict[str, list[float]]) -> dict[str, float]:
    """Return each backend's time relative to the other checkout; 1 means equal.

    The value is the median of the rounds' ratios, since a round takes its samples close in time.
    """
    ratios = {}
    for name, times in samples.items():
        before = samples.get(name + _BEFORE)
        if before:
            ratios[name] = statistics.median(a / b for a, b in zip(times, before, strict=True))
    return ratios


def measure_overlap(teams: list[Team], options: argparse.Namespace) -> dict[str, Any]:
    samples: dict[str, list[float]] = {team.library: [] for team in teams}
    for turn in range(options.rounds):
        for team in teams[turn % len(teams) :] + teams[: turn % len(teams)]:
            samples[team.library].append(team.ask("overlap", 0, "float32"))
    seconds = {name: statistics.median(times) for name, times in samples.items()}
    shown = " | ".join(f"{name} {exposed * 1e3:.1f} ms" for name, exposed in seconds.items())
    print(f"{options.ranks} exposed beside a computation, 4 x 16 MB: {shown}", flush=True)
    return {"ranks": options.ranks, "operation": "overlap", "seconds": seconds, "against": {}}


def render(row: dict[str, Any]) -> str:
    gloo, kind = row["seconds"].get("gloo"), base(row["operation"])
    moved = row["num_bytes"] * _BUS[kind](row["ranks"])
    cells = []
    for name, seconds in row["seconds"].items():
        ratio = f" x{gloo / seconds:.1f}" if gloo and name != "gloo" else ""
        speed = f" {moved / seconds / 1e9:.2f} GB/s" if moved > 4096 else ""
        cells.append(f"{name} {seconds * 1e6:.1f} us{speed}{ratio}")
    first = next(iter(row["seconds"].values()))
    head = f"{row['ranks']} {row['operation']} {row['dtype']} {row['num_bytes']}"
    bound = f" | of bound {bound_of(row) / first:.0%}" if moved > 4096 else ""
    ratios = "".join(f" | {name} {ratio:.2f} of before" for name, ratio in row["against"].items())
    return f"{head}: " + " | ".join(cells) + bound + ratios


def bound_of(row: dict[str, Any]) -> float:
    """Return the minimum time, in seconds, of the row's memory traffic on this machine."""
    return float(row["touch_s"] * _TRAFFIC[base(row["operation"])](row["ranks"]))


def base(operation: str) -> str:
    """Return the collective in a row's name, such as `all_reduce` in `all_reduce_max`."""
    return operation.removesuffix("_max").removesuffix("_async")


def summary(rows: list[dict[str, Any]]) -> list[str]:
    """Return one line per row that is slower than the other checkout, or one line if none is."""
    if not any(row["against"] for row in rows):
        return []
    slower = [
        f"slower: {row['ranks']} {row['operation']} {row['dtype']} {row['num_bytes']}: {name} "
        f"takes {ratio:.2f} of before"
        for row in rows
        for name, ratio in row["against"].items()
        if ratio > _SLOWER
    ]
    return slower or [f"no row of {len(rows)} takes more than {_SLOWER:.2f} of before"]


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    def names(text: str) -> list[str]:
        return text.split(",")

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--backends", type=names,
                        help="of native, python, shm+gloo, flat, xccl (each also as "
                             "NAME+recorder), gloo, mpich")  # fmt: skip
    parser.add_argument("--sizes", type=lambda text: [int(size) for size in names(text)])
    parser.add_argument("--dtypes", type=names, default=["float32"])
    parser.add_argument("--operations", type=names, help=f"of {', '.join(OPERATIONS + LATENCY)}")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--neighbors", type=int, default=0)
    parser.add_argument("--hosts", type=int, default=0, help="network namespaces; needs root")
    parser.add_argument("--overlap", action="store_true", help="measure that and nothing else")
    parser.add_argument("--latency", action="store_true",
                        help="4 bytes, blocking and asynchronous, recorder off and on")  # fmt: skip
    parser.add_argument("--against", metavar="CHECKOUT", help="another checkout, to compare with")
    parser.add_argument("--mpi-python")
    parser.add_argument("--json")
    options = parser.parse_args(argv)
    usual = (["native", "gloo"], SIZES, list(OPERATIONS))
    if options.latency:
        usual = (["native", "native+recorder", "gloo"], (4,), list(LATENCY))
    options.backends = options.backends or usual[0]
    options.sizes = options.sizes or usual[1]
    options.operations = options.operations or usual[2]
    return options


def main() -> None:
    options = parse()
    rows = measure(options)
    for line in summary(rows):
        print(line)
    if options.json:
        Path(options.json).write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
