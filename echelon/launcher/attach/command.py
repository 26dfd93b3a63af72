"""Implement `fr-analyze --attach`, which explains the state of a running job.

The job may have been started by any launcher, such as torchrun. The exit code is 0 if the job is
making progress, 1 if there is a finding, and 2 if no rank is found or an argument is invalid.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from echelon import __version__
from echelon.launcher.attach.look import GAP_S
from echelon.launcher.attach.ranks import (
    FoundRank,
    Search,
    find_ranks,
    numbered,
    rank_of,
    ranks_below,
)

if TYPE_CHECKING:
    from echelon.analysis.finding import Report
    from echelon.launcher.attach.look import Sighting

_REMOTE = "fr-analyze --attach --collect"


def main(argv: Sequence[str]) -> int:
    """Run `fr-analyze --attach` and return its exit code."""
    arguments = _parser().parse_args(argv)
    try:
        return _run(arguments)
    except (ValueError, OSError) as err:
        from echelon.analysis.report.clean import clean

        print(f"fr-analyze: {clean(str(err))}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fr-analyze",
        description="Look at a running job twice from outside and explain what blocks it. Nothing "
        "is stopped or changed.",
        epilog="Exit code: 0 the job makes progress, 1 a finding, 2 no rank was found.",
    )
    parser.add_argument(
        "--attach", nargs="*", type=int, metavar="PID",
        help="a rank or launcher of the job (default: the only job on this machine)",
    )  # fmt: skip
    parser.add_argument("--pid", type=int, metavar="PID", help="look at this process only")
    parser.add_argument(
        "--host", action="append", default=[], metavar="HOST[,HOST]",
        help="also look at these machines, through ssh",
    )  # fmt: skip
    parser.add_argument(
        "--ssh",
        default="ssh -o BatchMode=yes",
        metavar="COMMAND",
        help="command that reaches a host",
    )
    parser.add_argument(
        "--wait",
        type=float,
        default=GAP_S,
        metavar="S",
        help="time between the two snapshots (default 5)",
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="keep the snapshot in DIR")
    parser.add_argument("--json", action="store_true", help="print the verdict as JSON")
    parser.add_argument("--collect", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--job", help=argparse.SUPPRESS)  # the job's key, sent by another machine
    parser.add_argument("--version", action="version", version=f"fr-analyze {__version__}")
    return parser


def _run(arguments: argparse.Namespace) -> int:
    if not 0.5 <= arguments.wait <= 600:
        raise ValueError("--wait must be between 0.5 and 600 seconds")
    hosts = [name for text in arguments.host for name in text.split(",") if name]
    ranks = _chosen(arguments, may_be_none=bool(hosts))
    with tempfile.TemporaryDirectory(prefix="fr-analyze-") as scratch:
        if arguments.collect:
            return _collect(ranks, Path(scratch), arguments.wait)
        sighting, world_size = _look(ranks, hosts, arguments, Path(scratch))
        folder = arguments.out or Path(scratch) / "incident"
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise ValueError(f"--out: {folder} is not empty; choose a new or empty directory")
        report = _report(ranks, sighting, world_size, folder)
    _show(report, as_json=arguments.json)
    return report.exit_code


def _collect(ranks: Sequence[FoundRank], scratch: Path, gap_s: float) -> int:
    """Examine this machine's ranks on behalf of another machine; write the result to stdout."""
    from echelon.launcher.attach.hosts import pack
    from echelon.launcher.attach.look import look

    sighting = look(ranks, scratch, gap_s=gap_s)
    sys.stdout.buffer.write(pack(sighting, max(one.world_size for one in ranks)))
    sys.stdout.flush()
    return 0


def _look(
    ranks: Sequence[FoundRank], hosts: Sequence[str], arguments: argparse.Namespace, scratch: Path
) -> tuple[Sighting, int]:
    """Examine the local and the remote ranks concurrently; return the result and the world size."""
    import threading

    from echelon.launcher.attach.hosts import Answer, ask_all, merge
    from echelon.launcher.attach.look import look

    answers: list[Answer] = []
    remote = f"{_REMOTE} --wait {arguments.wait:g}"
    if ranks:
        remote += f" --job {shlex.quote(_key(ranks[0]))}"

    def ask() -> None:
        command = shlex.split(arguments.ssh)
        answers.extend(ask_all(hosts, command, remote, arguments.wait, scratch / "hosts"))

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    here = look(ranks, scratch, gap_s=arguments.wait) if ranks else None
    asking.join()
    sighting = merge(here, answers)
    if not sighting.records:
        said = "; ".join(sighting.notes)
        raise ValueError(f"found no job ranks on any machine: {said}")
    sizes = [one.world_size for one in ranks] + [one.world_size for one in answers]
    return sighting, max(sizes)


def _chosen(arguments: argparse.Namespace, *, may_be_none: bool) -> tuple[FoundRank, ...]:
    """Return the ranks of the job that the command line selects.

    Raises:
        ValueError: a process does not exist, no job matches, or several jobs match.
    """
    if arguments.pid is not None:
        _check(arguments.pid)
        one = rank_of(arguments.pid)
        return (one,) if one is not None else numbered([arguments.pid])
    if not arguments.attach:
        found = find_ranks()
        if arguments.job is not None:
            chosen = tuple(one for one in found.ranks if _key(one) == arguments.job)
            found = Search(ranks=chosen, num_denied=found.num_denied)
        return _only_job(found, may_be_none=may_be_none)
    for pid in arguments.attach:
        _check(pid)
    searches = [ranks_below(pid) for pid in arguments.attach]
    by_pid = {one.pid: one for search in searches for one in search.ranks}
    if len(by_pid) > 1 and all(one.is_guessed for one in by_pid.values()):
        return numbered(sorted(by_pid))
    return _only_job(Search(ranks=tuple(by_pid.values())), may_be_none=False)


def _key(one: FoundRank) -> str:
    """Return a string that identifies a rank's job and is the same on all machines."""
    return "|".join(one.job)


def _check(pid: int) -> None:
    if not Path(f"/proc/{pid}").is_dir():
        raise ValueError(f"there is no process {pid} on this machine")


def _only_job(search: Search, *, may_be_none: bool) -> tuple[FoundRank, ...]:
    jobs = search.jobs()
    if not jobs and may_be_none:
        return ()
    if not jobs:
        denied = f"; access to {search.num_denied} processes is denied" if search.num_denied else ""
        raise ValueError(
            "no job ranks are running on this machine: no process has RANK and WORLD_SIZE, or the "
            f"equivalent variables of MPI or Slurm, in its environment{denied}. Specify the "
            "processes with --attach PID ..."
        )
    if len(jobs) > 1:
        listed = ", ".join(f"{len(of)} ranks (pid {of[0].pid} ...)" for of in jobs.values())
        raise ValueError(
            f"{len(jobs)} jobs are running on this machine: {listed}. Choose one: --attach PID"
        )
    return tuple(next(iter(jobs.values())))


def _report(
    ranks: Sequence[FoundRank], sighting: Sighting, world_size: int, folder: Path
) -> Report:
    from echelon.launcher.attach.look import keep, torch_dump
    from echelon.launcher.attach.verdict import judge

    keep(sighting, folder, world_size, "attached from outside")
    for one in ranks:
        dump = torch_dump(one)
        if dump:
            (folder / f"torch_rank_{one.rank}").write_bytes(dump)
    return judge(sighting, folder, world_size)


def _show(report: Report, *, as_json: bool) -> None:
    from echelon.analysis.report.clean import clean

    if as_json:
        print(json.dumps(report.to_json(), indent=1))
        for line in (f"saw {report.origin}", *report.warnings):
            print(f"fr-analyze: {clean(line)}", file=sys.stderr)
        return
    from rich.console import Console

    from echelon.analysis.report.text import render_text

    render_text(report, Console(highlight=False), None)
