"""Inject faults into real jobs and compare the verdicts with what was injected.

    python benchmarks/faults.py                  # the whole matrix, a few minutes
    python benchmarks/faults.py --only host_hang,exception
    python benchmarks/faults.py --list

Every case is a job of 2 to 8 processes under `echelon run`; one rank does something wrong at step
20, or nobody does. The job's folder is then read as `fr-analyze` reads it. A case is right if cause
and culprit ranks are exactly those injected; a healthy one, if the job ends well without an
incident and without a finding. Cases that this build or machine cannot run say why.
"""
# ruff: noqa: D102 -- each class says in its own line what its overrides do

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

AT_STEP = 20
STEPS = 40
STALL_S = 4.0
JOB_TIMEOUT_S = 90.0

# ---- the job: one step of training, as a rank of it sees it ----


class Worker:
    """What every rank does; faults override one part of it on one rank."""

    def __init__(self, world: Any, culprit: int) -> None:
        self.world = world
        self.culprit = culprit
        self.is_culprit = world.rank == culprit
        self.step = 0

    @property
    def is_due(self) -> bool:
        """Whether this rank is to go wrong now."""
        return self.is_culprit and self.step == AT_STEP

    def run(self) -> None:
        """Train for a while."""
        from echelon import recorder

        for step in range(self.num_steps()):
            self.step = step
            recorder.step()
            with recorder.span("data_wait"):
                self.data()
            with recorder.span("compute"):
                self.compute()
            for bucket in range(3):
                self.reduce(bucket)
            self.log()
        self.finish()

    def num_steps(self) -> int:
        """How many steps this rank makes."""
        return STEPS

    def data(self) -> None:
        """Fetch a batch."""

    def compute(self) -> None:
        """Compute gradients."""
        time.sleep(0.002)

    def reduce(self, bucket: int) -> None:
        """Average one bucket of gradients."""
        self.world.all_reduce(np.ones(256 * (bucket + 1), np.float32))

    def log(self) -> None:
        """Average the loss."""
        self.world.all_reduce(np.ones(1, np.float32))

    def finish(self) -> None:
        """Meet at the end."""
        self.world.barrier()


def wait_for_ever() -> None:
    """Block in ordinary code."""
    threading.Event().wait()


class OtherOperation(Worker):
    """Broadcast where the others reduce."""

    def reduce(self, bucket: int) -> None:
        if self.is_due and bucket == 1:
            self.world.broadcast(np.ones(512, np.float32), 0)
        else:
            super().reduce(bucket)


class OtherShape(Worker):
    """Pass one element less."""

    def reduce(self, bucket: int) -> None:
        if self.is_due and bucket == 1:
            self.world.all_reduce(np.ones(511, np.float32))
        else:
            super().reduce(bucket)


class OtherType(Worker):
    """Pass float64."""

    def reduce(self, bucket: int) -> None:
        if self.is_due and bucket == 1:
            self.world.all_reduce(np.ones(512, np.float64))
        else:
            super().reduce(bucket)


class OtherReduction(Worker):
    """Take the maximum where the others sum."""

    def reduce(self, bucket: int) -> None:
        self.world.all_reduce(
            np.ones(256 * (bucket + 1), np.float32), "max" if self.is_due else "sum"
        )


class OtherRoot(Worker):
    """Broadcast from another root."""

    def log(self) -> None:
        self.world.broadcast(np.ones(4, np.float32), 1 if self.is_due else 0)


class OtherSplits(Worker):
    """Send one element more to one rank than it expects."""

    def log(self) -> None:
        size = self.world.size
        sends, receives = [2] * size, [2] * size
        if self.is_due:
            sends[(self.world.rank + 1) % size] = 3
        data = np.ones(sum(sends), np.float32)
        self.world.all_to_all(np.empty(sum(receives), np.float32), data, receives, sends)


class SkipBucket(Worker):
    """Leave out a bucket of another size than the next."""

    def reduce(self, bucket: int) -> None:
        if not (self.is_due and bucket == 1):
            super().reduce(bucket)


class SkipEqualBucket(Worker):
    """Leave out one of equal buckets: only the step number shows it."""

    def reduce(self, bucket: int) -> None:
        if not (self.is_due and bucket == 1):
            self.world.all_reduce(np.ones(256, np.float32))

    def log(self) -> None:
        self.world.all_reduce(np.ones(256, np.float32))


class FewerBatches(Worker):
    """Run out of data one step before the others."""

    def num_steps(self) -> int:
        return STEPS - (1 if self.is_culprit else 0)


class RepeatBucket(Worker):
    """Reduce one bucket twice."""

    def reduce(self, bucket: int) -> None:
        for _ in range(2 if self.is_due and bucket == 1 else 1):
            super().reduce(bucket)


class HangInCode(Worker):
    """Wait in ordinary code."""

    def compute(self) -> None:
        if self.is_due:
            wait_for_ever()
        super().compute()


class SpinInCode(Worker):
    """Compute for ever."""

    def compute(self) -> None:
        while self.is_due:
            sum(range(1000))
        super().compute()


class HangInFirstStep(HangInCode):
    """Hang before the first collective."""

    @property
    def is_due(self) -> bool:
        return self.is_culprit and self.step == 0


class StarveOfData(Worker):
    """Wait for a batch that never comes."""

    def data(self) -> None:
        if self.is_due:
            wait_for_ever()


class InSpan(Worker):
    """Hang inside a span of this name."""

    name = ""

    def compute(self) -> None:
        from echelon import recorder

        if self.is_due:
            with recorder.span(self.name, "epoch/7"):
                wait_for_ever()
        super().compute()


class StallStorage(InSpan):
    """Hang in a checkpoint."""

    name = "checkpoint"


class StallCompiler(InSpan):
    """Hang in a compiler."""

    name = "compile"


class WaitForStore(InSpan):
    """Hang in a store request."""

    name = "store"


class HoldLock(Worker):
    """Compute in C for hours, with the interpreter's lock held."""

    def compute(self) -> None:
        if self.is_due:
            pow(7, 1 << 33)  # a sleep in C would be ended by the signal that asks for stacks
        super().compute()


class DeviceNeverDone(Worker):
    """Take part in an operation whose end is never told, as a stuck device's stream does."""

    def reduce(self, bucket: int) -> None:
        if self.is_due and bucket == 1:
            engine = self.world._backend
            carry_out = engine.execute

            def never_done(operation: object) -> None:
                carry_out(operation)
                wait_for_ever()

            engine.execute = never_done
        super().reduce(bucket)


class Freeze(Worker):
    """Be stopped by a signal."""

    def compute(self) -> None:
        if self.is_due:
            os.kill(os.getpid(), signal.SIGSTOP)
        super().compute()


class Raise(Worker):
    """Raise an exception."""

    def compute(self) -> None:
        if self.is_due:
            raise ValueError("a corrupt batch")
        super().compute()


class Kill(Worker):
    """Die of SIGKILL."""

    def compute(self) -> None:
        if self.is_due:
            os.kill(os.getpid(), signal.SIGKILL)
        super().compute()


class Segfault(Worker):
    """Die of a wild pointer."""

    def compute(self) -> None:
        if self.is_due:
            ctypes.string_at(0)
        super().compute()


class ExitAtOnce(Worker):
    """Leave through os._exit."""

    def compute(self) -> None:
        if self.is_due:
            os._exit(7)
        super().compute()


class ExitQuietly(Worker):
    """Leave through sys.exit with a code."""

    def compute(self) -> None:
        if self.is_due:
            sys.exit(3)
        super().compute()


class UseUpMemory(Worker):
    """Ask for more memory than there is."""

    def compute(self) -> None:
        if self.is_due:
            bytearray(1 << 60)
        super().compute()


class LagBehind(Worker):
    """Be slower than the others in every step."""

    def num_steps(self) -> int:
        return 80

    def compute(self) -> None:
        time.sleep(0.03 if self.is_culprit else 0.005)


class Desync(Worker):
    """Enter two groups in another order."""

    def __init__(self, world: Any, culprit: int) -> None:
        super().__init__(world, culprit)
        import echelon.dist as dist

        everybody = list(range(world.size))
        self.groups = [dist.new_group(everybody, name=name) for name in ("left", "right")]

    def log(self) -> None:
        half = self.world.rank >= self.world.size // 2
        turned = half and self.step == AT_STEP
        for group in reversed(self.groups) if turned else self.groups:
            group.all_reduce(np.ones(4, np.float32))


class HangInSubgroup(Worker):
    """Hang before a subgroup's collective; the other subgroup goes on to the world's."""

    def __init__(self, world: Any, culprit: int) -> None:
        super().__init__(world, culprit)
        import echelon.dist as dist

        half = world.size // 2
        low = dist.new_group(list(range(half)), name="low")
        high = dist.new_group(list(range(half, world.size)), name="high")
        self.group = low if world.rank < half else high

    def log(self) -> None:
        if self.is_due:
            wait_for_ever()
        self.group.all_reduce(np.ones(4, np.float32))


class Pipeline(Worker):
    """Pass a tensor from rank to rank."""

    def log(self) -> None:
        rank, last = self.world.rank, self.world.size - 1
        if rank > 0:
            self.before_receiving()
            self.world.recv(np.empty(4, np.float32), self.source())
        if rank < last:
            self.world.send(np.ones(4, np.float32), rank + 1)

    def before_receiving(self) -> None:
        """Do nothing."""

    def source(self) -> int:
        """Return whom to receive from."""
        return self.world.rank - 1


class HangInPipeline(Pipeline):
    """Hang before receiving."""

    def before_receiving(self) -> None:
        if self.is_due:
            wait_for_ever()


class WrongPeer(Pipeline):
    """Receive from the rank after, not from the one before."""

    def source(self) -> int:
        return self.world.rank + 1 if self.is_due else self.world.rank - 1


class Jitter(Worker):
    """Take a different time in every step."""

    def compute(self) -> None:
        time.sleep(((self.step * 7 + self.world.rank * 13) % 11) / 1000)


class SaveSometimes(Worker):
    """Let rank 0 write a checkpoint now and then."""

    def compute(self) -> None:
        from echelon import recorder

        if self.world.rank == 0 and self.step % 15 == 14:
            with recorder.span("checkpoint"):
                time.sleep(0.2)
        super().compute()


class Mixed(Worker):
    """Use all collectives, with changing roots."""

    def log(self) -> None:
        size = self.world.size
        self.world.broadcast(np.ones(8, np.float32), self.step % size)
        out = np.empty(4 * size, np.float32)
        self.world.all_gather(out, np.ones(4, np.float32))
        self.world.reduce_scatter(np.empty(4, np.float32), out)


class Overlapped(Worker):
    """Issue buckets without waiting, and wait at the end of the step."""

    def reduce(self, bucket: int) -> None:
        self.works = [] if bucket == 0 else self.works
        data = np.ones(256 * (bucket + 1), np.float32)
        self.works.append(self.world.all_reduce(data, async_op=True))

    def log(self) -> None:
        for work in self.works:
            work.wait()
        super().log()


class Catch(Worker):
    """Raise and catch exceptions in the loop."""

    def compute(self) -> None:
        try:
            raise ValueError("and nobody minds")
        except ValueError:
            super().compute()


# ---- the matrix ----


@dataclass(frozen=True)
class Case:
    """A job, and what is to be said of it."""

    cause: str  # "healthy": nothing
    worker: type[Worker]
    ranks: int
    culprit: int
    culprits: tuple[int, ...] | None = None
    needs: str = ""  # a call of the world group that the case makes

    @property
    def name(self) -> str:
        """Name it for people and for the command line."""
        return f"{self.cause}-{self.worker.__name__}-{self.ranks}r{self.culprit}"

    @property
    def expected(self) -> tuple[str, tuple[int, ...]]:
        """What the verdict is to be."""
        if self.cause == "healthy":
            return "healthy", ()
        return self.cause, (self.culprit,) if self.culprits is None else self.culprits


CASES = [
    Case("op_mismatch", OtherOperation, 4, 1),
    Case("op_mismatch", OtherOperation, 3, 0),
    Case("shape_mismatch", OtherShape, 4, 3),
    Case("shape_mismatch", OtherShape, 8, 5),
    Case("shape_mismatch", OtherShape, 2, 1, culprits=(0, 1)),  # a tie names both sides
    Case("dtype_mismatch", OtherType, 4, 2),
    Case("reduce_op_mismatch", OtherReduction, 4, 0),
    Case("root_mismatch", OtherRoot, 5, 4),
    Case("split_mismatch", OtherSplits, 4, 2, needs="all_to_all"),
    Case("skipped_collective", SkipBucket, 4, 2),
    Case("skipped_collective", SkipEqualBucket, 4, 1),
    Case("skipped_collective", FewerBatches, 4, 3),
    Case("skipped_collective", RepeatBucket, 3, 0),
    Case("order_desync", Desync, 4, 0, culprits=(0, 1, 2, 3), needs="new_group"),
    Case("p2p_unmatched", WrongPeer, 4, 1, needs="send"),
    Case("host_hang", HangInPipeline, 4, 2, needs="send"),
    Case("host_hang", HangInSubgroup, 4, 3, needs="new_group"),
    Case("data_starvation", StarveOfData, 4, 1),
    Case("data_starvation", StarveOfData, 8, 6),
    Case("storage_stall", StallStorage, 2, 1),
    Case("compile_stall", StallCompiler, 4, 0),
    Case("store_wait", WaitForStore, 4, 3),
    Case("host_hang", HangInCode, 4, 2),
    Case("host_hang", HangInCode, 2, 0),
    Case("host_hang", SpinInCode, 4, 3),
    Case("host_hang", HangInFirstStep, 3, 1),
    Case("gil_hang", HoldLock, 4, 1),
    Case("device_stuck", DeviceNeverDone, 4, 2),
    Case("frozen_process", Freeze, 4, 2),
    Case("exception", Raise, 4, 2),
    Case("exception", Raise, 2, 1),
    Case("dead_process", Kill, 4, 3),
    Case("dead_process", Segfault, 4, 1),
    Case("dead_process", ExitAtOnce, 3, 0),
    Case("dead_process", ExitQuietly, 2, 1),
    Case("out_of_memory", UseUpMemory, 4, 0),
    Case("straggler", LagBehind, 4, 3),
    Case("healthy", Worker, 2, 0),
    Case("healthy", Worker, 4, 0),
    Case("healthy", Worker, 8, 0),
    Case("healthy", Jitter, 4, 0),
    Case("healthy", SaveSometimes, 4, 0),
    Case("healthy", Mixed, 3, 0),
    Case("healthy", Overlapped, 4, 0),
    Case("healthy", Catch, 2, 0),
    Case("healthy", Pipeline, 4, 0, needs="send"),
]


def work(case: Case) -> None:
    """Be one rank of a case."""
    import echelon.dist as dist

    world = dist.init()
    case.worker(world, case.culprit).run()
    dist.shutdown()


# ---- running it ----


@dataclass(frozen=True)
class Outcome:
    """What was said of a case."""

    said: tuple[str, tuple[int, ...]]
    confidence: str
    seconds: float
    summary: str


def missing(case: Case) -> str:
    """Say why a case cannot run here, "" if it can."""
    import echelon.dist as dist
    from echelon.dist.group import ProcessGroup

    if case.needs and not (hasattr(ProcessGroup, case.needs) or hasattr(dist, case.needs)):
        return f"echelon.dist has no {case.needs} yet"
    return ""


def run(case: Case, folder: Path) -> Outcome:
    """Run a case's job to its end and read its folder."""
    from echelon.analysis import analyze

    run_dir = folder / case.name
    command = [
        sys.executable, "-m", "echelon", "run", "--run-dir", str(run_dir),
        "--nproc-per-node", str(case.ranks), "--stall-timeout", str(STALL_S),
        "--on-stall", "stop", __file__, "--work", case.name,
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    began = time.perf_counter()
    with (folder / f"{case.name}.log").open("wb") as log:
        code = subprocess.run(
            command, stdout=log, stderr=log, env=environment, timeout=JOB_TIMEOUT_S, check=False
        ).returncode
    seconds = time.perf_counter() - began
    report = analyze(run_dir)
    if report.verdict is None:
        incidents = (
            list((run_dir / "dump").glob("incident_*")) if (run_dir / "dump").exists() else []
        )
        well = code == 0 and not incidents
        said = "healthy" if well else f"nothing, exit code {code}, {len(incidents)} incidents"
        return Outcome((said, ()), "", seconds, "")
    verdict = report.verdict
    said = (verdict.cause.value, verdict.culprit_ranks)
    return Outcome(said, verdict.confidence.value, seconds, verdict.summary)


def main() -> int:
    """Run the matrix and print its table."""
    options = _parser().parse_args()
    if options.work:
        work(next(case for case in CASES if case.name == options.work))
        return 0
    chosen = [case for case in CASES if not options.only or _is_chosen(case, options.only)]
    if options.list:
        print("\n".join(case.name for case in chosen))
        return 0
    if options.keep is not None:
        options.keep.mkdir(parents=True, exist_ok=True)
        return _run_all(chosen, options.keep, print)
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        return _run_all(chosen, Path(folder), print)


def _run_all(cases: list[Case], folder: Path, say: Callable[[str], None]) -> int:
    say("| injected | by | ranks | culprit | said | culprits | confidence | right |")
    say("|---|---|---|---|---|---|---|---|")
    right = ran = 0
    for case in cases:
        why = missing(case)
        cause, culprits = case.expected
        head = f"| {cause} | {case.worker.__name__} | {case.ranks} | {_ranks(culprits)} |"
        if why:
            say(f"{head} not run: {why} | | | |")
            continue
        outcome = run(case, folder)
        good = outcome.said == case.expected
        ran, right = ran + 1, right + good
        sign = "yes" if good else f"NO: {outcome.summary}"
        said, named = outcome.said
        say(f"{head} {said} | {_ranks(named)} | {outcome.confidence} | {sign} |")
    say(f"\n{right} of {ran} right ({right / max(1, ran):.0%}), {len(cases) - ran} not run")
    return 0 if right == ran else 1


def _is_chosen(case: Case, only: str) -> bool:
    return any(part in case.name for part in only.split(","))


def _ranks(ranks: tuple[int, ...]) -> str:
    return ", ".join(map(str, ranks)) or "-"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--only", default="", metavar="TEXT,...", help="cases whose names hold these"
    )
    parser.add_argument("--list", action="store_true", help="print the names and do nothing")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep the jobs' folders there")
    parser.add_argument("--work", default="", metavar="CASE", help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    sys.exit(main())
