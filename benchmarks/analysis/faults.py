"""Inject faults into real jobs and compare the verdicts with what was injected.

    python -m benchmarks.analysis.faults                  # the whole matrix, a few minutes
    python -m benchmarks.analysis.faults --only host_hang,exception
    python -m benchmarks.analysis.faults --torch          # plain torch programs instead, over Gloo
    python -m benchmarks.analysis.faults --part 2/3       # the second third of the cases
    python -m benchmarks.analysis.faults --list

Every case is a job of 2 to 8 processes under `echelon run`. One rank fails at step 20, or none
does. The job's folder is then read as `fr-analyze` reads it. A case is right if the cause and the
culprit ranks are exactly those injected. A healthy case is right if the job succeeds without an
incident and without a finding. Cases that this build or machine cannot run are listed with the
reason.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.analysis import faulty

STALL_S = 4.0
JOB_TIMEOUT_S = 90.0
GRACE_S = 20.0  # for a job that is stopped
_JOB = Path(faulty.__file__)
_TORCH_JOB = _JOB.with_name("faulty_torch.py")


@dataclass(frozen=True)
class Case:
    """A job and its expected verdict."""

    cause: str  # "healthy": nothing
    worker: type[faulty.Worker]
    ranks: int
    culprit: int
    culprits: tuple[int, ...] | None = None
    needs: str = ""  # a call of the world group that the case makes

    @property
    def name(self) -> str:
        """The case's name for readers and for the command line."""
        return f"{self.cause}-{self.worker.__name__}-{self.ranks}r{self.culprit}"

    @property
    def expected(self) -> tuple[str, tuple[int, ...]]:
        """The expected verdict."""
        if self.cause == "healthy":
            return "healthy", ()
        return self.cause, (self.culprit,) if self.culprits is None else self.culprits

    @property
    def by(self) -> str:
        """The source of the fault in the table: the worker's class."""
        return self.worker.__name__

    @property
    def stall_s(self) -> float:
        """The launcher's stall timeout."""
        return STALL_S

    @property
    def command(self) -> list[str]:
        """The program and its arguments, after those of the launcher."""
        return [str(_JOB), self.worker.__name__, str(self.culprit)]


CASES = [
    Case("op_mismatch", faulty.OtherOperation, 4, 1),
    Case("op_mismatch", faulty.OtherOperation, 3, 0),
    Case("shape_mismatch", faulty.OtherShape, 4, 3),
    Case("shape_mismatch", faulty.OtherShape, 8, 5),
    Case("shape_mismatch", faulty.OtherShape, 2, 1, culprits=(0, 1)),  # a tie names both sides
    Case("dtype_mismatch", faulty.OtherType, 4, 2),
    Case("reduce_op_mismatch", faulty.OtherReduction, 4, 0),
    Case("root_mismatch", faulty.OtherRoot, 5, 4),
    Case("split_mismatch", faulty.OtherSplits, 4, 2, needs="all_to_all"),
    Case("skipped_collective", faulty.SkipBucket, 4, 2),
    Case("skipped_collective", faulty.SkipEqualBucket, 4, 1),
    Case("skipped_collective", faulty.FewerBatches, 4, 3),
    Case("skipped_collective", faulty.RepeatBucket, 3, 0),
    Case("order_desync", faulty.Desync, 4, 0, culprits=(0, 1, 2, 3), needs="new_group"),
    Case("p2p_unmatched", faulty.WrongPeer, 4, 1, needs="send"),
    Case("host_hang", faulty.HangInPipeline, 4, 2, needs="send"),
    Case("host_hang", faulty.HangInSubgroup, 4, 3, needs="new_group"),
    Case("data_starvation", faulty.StarveOfData, 4, 1),
    Case("data_starvation", faulty.StarveOfData, 8, 6),
    Case("storage_stall", faulty.StallStorage, 2, 1),
    Case("compile_stall", faulty.StallCompiler, 4, 0),
    Case("store_wait", faulty.WaitForStore, 4, 3),
    Case("host_hang", faulty.HangInCode, 4, 2),
    Case("host_hang", faulty.HangInCode, 2, 0),
    Case("host_hang", faulty.SpinInCode, 4, 3),
    Case("host_hang", faulty.HangInFirstStep, 3, 1),
    Case("gil_hang", faulty.HoldLock, 4, 1),
    Case("device_stuck", faulty.DeviceNeverDone, 4, 2),
    Case("frozen_process", faulty.Freeze, 4, 2),
    Case("exception", faulty.Raise, 4, 2),
    Case("exception", faulty.Raise, 2, 1),
    Case("dead_process", faulty.Kill, 4, 3),
    Case("dead_process", faulty.Segfault, 4, 1),
    Case("dead_process", faulty.ExitAtOnce, 3, 0),
    Case("dead_process", faulty.ExitQuietly, 2, 1),
    Case("out_of_memory", faulty.UseUpMemory, 4, 0),
    Case("straggler", faulty.LagBehind, 4, 3),
    Case("healthy", faulty.Worker, 2, 0),
    Case("healthy", faulty.Worker, 4, 0),
    Case("healthy", faulty.Worker, 8, 0),
    Case("healthy", faulty.Jitter, 4, 0),
    Case("healthy", faulty.SaveSometimes, 4, 0),
    Case("healthy", faulty.Mixed, 3, 0),
    Case("healthy", faulty.Overlapped, 4, 0),
    Case("healthy", faulty.Catch, 2, 0),
    Case("healthy", faulty.Pipeline, 4, 0, needs="send"),
]


@dataclass(frozen=True)
class TorchCase:
    """A plain torch program; torch's timeout or the launcher's stall ends the waiting ranks."""

    cause: str
    fault: str
    ranks: int
    culprit: int
    timeout_s: float = 600.0  # torch's
    stall_s: float = 6.0
    needs: str = ""

    @property
    def name(self) -> str:
        """The case's name for readers and for the command line."""
        who = "watchdog" if self.timeout_s < self.stall_s else "stall"
        return f"{self.cause}-torch-{self.fault}-{who}-{self.ranks}r{self.culprit}"

    @property
    def by(self) -> str:
        """The source of the fault in the table, with torch's timeout if it ends the job."""
        return f"torch {self.fault}" + (
            f", torch's timeout {self.timeout_s:g} s" if self.timeout_s < self.stall_s else ""
        )

    @property
    def expected(self) -> tuple[str, tuple[int, ...]]:
        """The expected verdict."""
        return (self.cause, ()) if self.cause == "healthy" else (self.cause, (self.culprit,))

    @property
    def command(self) -> list[str]:
        """The program and its arguments, after those of the launcher."""
        return [str(_TORCH_JOB), self.fault, str(self.culprit), "--timeout", str(self.timeout_s)]


# Gloo keeps no record of a rank's calls, so mismatches and skipped calls cannot be detected.
TORCH_CASES = [
    TorchCase("host_hang", "Hang", 4, 2),
    TorchCase("host_hang", "Hang", 2, 0),
    TorchCase("host_hang", "Hang", 4, 1, timeout_s=6.0, stall_s=60.0),
    TorchCase("host_hang", "Spin", 4, 3, timeout_s=6.0, stall_s=60.0),
    TorchCase("host_hang", "Spin", 4, 3),
    TorchCase("frozen_process", "Freeze", 4, 1),
    TorchCase("frozen_process", "Freeze", 4, 2, timeout_s=6.0, stall_s=60.0),
    TorchCase("exception", "Raise", 4, 2),
    TorchCase("exception", "Raise", 2, 1),
    TorchCase("dead_process", "Kill", 4, 3),
    TorchCase("dead_process", "Exit", 4, 0),
    TorchCase("healthy", "Nothing", 4, 0),
]


@dataclass(frozen=True)
class Outcome:
    """The verdict on a case."""

    said: tuple[str, tuple[int, ...]]
    confidence: str
    seconds: float
    summary: str


def missing(case: Case | TorchCase) -> str:
    """Return why a case cannot run here, or "" if it can."""
    import echelon.dist as dist
    from echelon.dist.group import ProcessGroup

    if case.needs and not (hasattr(ProcessGroup, case.needs) or hasattr(dist, case.needs)):
        return f"echelon.dist has no {case.needs} yet"
    return ""


def _ended(job: subprocess.Popen[bytes], timeout_s: float) -> int | None:
    """Return a job's exit code; if it exceeds the limit, stop it and return None."""
    try:
        return job.wait(timeout_s)
    except subprocess.TimeoutExpired:
        job.terminate()
    try:
        job.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        job.kill()
        job.wait()
    return None


def run(case: Case | TorchCase, folder: Path, *, timeout_s: float = JOB_TIMEOUT_S) -> Outcome:
    """Run a case's job to its end and read its folder.

    A job that exceeds `timeout_s` is stopped, so that the remaining cases can run.
    """
    from echelon.analysis import analyze

    run_dir = folder / case.name
    command = [
        sys.executable, "-m", "echelon", "run", "--run-dir", str(run_dir),
        "--nproc-per-node", str(case.ranks), "--stall-timeout", str(case.stall_s),
        "--on-stall", "stop", *case.command,
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    began = time.perf_counter()
    with (folder / f"{case.name}.log").open("wb") as log:
        code = _ended(subprocess.Popen(command, stdout=log, stderr=log, env=environment), timeout_s)
    seconds = time.perf_counter() - began
    if code is None:
        words = f"the job still ran after {timeout_s:g} s; its log: {folder / case.name}.log"
        return Outcome(("no end", ()), "", seconds, words)
    if isinstance(case, TorchCase) and code == 0 and not (run_dir / "dump").exists():
        return Outcome(("healthy", ()), "", seconds, "")  # nothing recorded, and nothing collected
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
    cases: Sequence[Case | TorchCase] = TORCH_CASES if options.torch else CASES
    chosen = [case for case in cases if not options.only or _is_chosen(case, options.only)]
    part, parts = options.part
    chosen = chosen[part - 1 :: parts]
    if options.list:
        print("\n".join(case.name for case in chosen))
        return 0
    if options.keep is not None:
        options.keep.mkdir(parents=True, exist_ok=True)
        return _run_all(chosen, options.keep, print)
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        return _run_all(chosen, Path(folder), print)


def _run_all(cases: Sequence[Case | TorchCase], folder: Path, say: Callable[[str], None]) -> int:
    say("| injected | by | ranks | culprit | said | culprits | confidence | right |")
    say("|---|---|---|---|---|---|---|---|")
    right = ran = 0
    for case in cases:
        why = missing(case)
        cause, culprits = case.expected
        head = f"| {cause} | {case.by} | {case.ranks} | {_ranks(culprits)} |"
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


def _is_chosen(case: Case | TorchCase, only: str) -> bool:
    return any(part in case.name for part in only.split(","))


def _part(text: str) -> tuple[int, int]:
    part, _, parts = text.partition("/")
    if not 1 <= int(part) <= int(parts or 0):
        raise ValueError(text)
    return int(part), int(parts)


def _ranks(ranks: tuple[int, ...]) -> str:
    return ", ".join(map(str, ranks)) or "-"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--only", default="", metavar="TEXT,...", help="cases whose names hold these"
    )
    parser.add_argument(
        "--part", type=_part, default=(1, 1), metavar="N/PARTS", help="each PARTSth case only"
    )
    parser.add_argument("--torch", action="store_true", help="plain torch programs instead")
    parser.add_argument("--list", action="store_true", help="print the names and do nothing")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep the jobs' folders there")
    return parser


if __name__ == "__main__":
    sys.exit(main())
