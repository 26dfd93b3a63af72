"""Run `echelon status [ENDPOINT|RUN_DIR]`, which shows a live table of a running job.

With a run directory, the table shows this node's ranks, as read from their rings. The default is
the newest run directory in runs/.

With an endpoint (HOST:PORT, as in --rdzv-endpoint), the table shows the ranks of all nodes, and the
command works on any machine. The command then needs the job's secret from --rdzv-secret-file,
ECHELON_SECRET or a job.json in runs/. The endpoint of a single-node job is its store's endpoint.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import select
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from echelon import __version__
from echelon.errors import LaunchError
from echelon.launcher.control.endpoint import join, read_secret, split
from echelon.launcher.control.tls import TlsFiles, tls_files
from echelon.launcher.limits.kept import as_lines, read_limits
from echelon.launcher.options.texts import listen_at
from echelon.launcher.status.status import RankStatus, newest_run, read_statuses, ring_paths

if TYPE_CHECKING:
    from rich.table import Table

    from echelon.launcher.control.client import GrpcLink
    from echelon.launcher.control.messages import Statuses

_REFRESH_S = 1.0
_DIAL_S = 5.0
_CLOSED = "the connection was closed"
_ANSWER_S = 5.0
_RUNS = Path("runs")


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the table: a rank and its host."""

    host: str  # "" if only this host is shown
    status: RankStatus


@dataclass(frozen=True, slots=True)
class View:
    """The contents of the status table at one moment."""

    title: str
    rows: Sequence[Row]
    missing_nodes: int = 0  # nodes that did not answer
    is_over: bool = False
    limits: Sequence[str] = ()  # the learned limits, one line each


def main(argv: Sequence[str]) -> int:
    """Run the command; return the exit code.

    The exit code is 1 if the job does not answer or the live page cannot be served, and 2 if the
    run is not found or an argument is invalid.
    """
    parser = argparse.ArgumentParser(
        prog="echelon status", description="Show what the ranks of a running job are doing."
    )
    parser.add_argument("--version", action="version", version=f"echelon {__version__}")
    parser.add_argument(
        "place", nargs="?", metavar="ENDPOINT|RUN_DIR", help="the endpoint, or a run directory"
    )
    parser.add_argument("--once", action="store_true", help="print the table once and exit")
    parser.add_argument(
        "--web", action="store_true", help="serve a live page of the run, and print its address"
    )
    parser.add_argument(
        "--listen",
        type=listen_at,
        default=None,
        metavar="[ADDRESS:]PORT",
        help="where --web listens (default: any free port on loopback; with another address, the "
        "printed URL contains a token)",
    )
    parser.add_argument("--rdzv-secret-file", type=Path, metavar="FILE", help="the job's secret")
    for name in ("cert", "key", "ca"):
        parser.add_argument(f"--rdzv-{name}", type=Path, metavar="FILE", help="TLS, as for run")
    args = parser.parse_args(list(argv))
    once = args.once or not sys.stdout.isatty()
    try:
        if args.web:
            return _serve(_run_of(args.place), *(args.listen or ("127.0.0.1", 0)))
        if args.listen:
            parser.error("--listen needs --web")
        if args.place is not None and ":" in args.place and not Path(args.place).exists():
            return _show_endpoint(args, once=once)
        return _show_run(Path(args.place) if args.place else newest_run(_RUNS), once=once)
    except ValueError as err:
        print(f"echelon status: {err}", file=sys.stderr)
        return 2
    except LaunchError as err:
        print(f"echelon status: {err}", file=sys.stderr)
        return 1


def _run_of(place: str | None) -> Path:
    """Return the run directory that the command's argument refers to.

    Raises:
        ValueError: this machine has no such run.
    """
    if place is not None and ":" in place and not Path(place).exists():
        run_dir, _ = _run_with(join(*split(place)))
    else:
        run_dir = Path(place) if place else newest_run(_RUNS)
    if run_dir is None or not run_dir.is_dir():
        what = (
            "no runs found in runs/" if place is None else f"{place}: no such run on this machine"
        )
        raise ValueError(f"{what}; --web needs the run directory of the hosting node")
    return run_dir


def _serve(run_dir: Path, address: str, port: int) -> int:
    from echelon.launcher.status.web.server import PageServer
    from echelon.launcher.status.web.state import state_of

    try:
        server = PageServer(address, port, lambda: state_of(run_dir))
    except OSError as err:
        raise LaunchError(f"cannot listen on {join(address, port)}: {err.strerror or err}") from err
    print(f"{run_dir} at {server.url} (stop with Ctrl-C)", flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        server.serve()
    return 0


def _show_run(run_dir: Path | None, *, once: bool) -> int:
    if run_dir is None or not ring_paths(run_dir):
        what = "no runs found in runs/" if run_dir is None else f"{run_dir}: no rank's ring found"
        raise ValueError(f"{what}; give a run directory or an endpoint")

    def views(run: Path) -> Iterator[View]:
        while True:
            rows = [Row("", status) for status in read_statuses(run)]
            folders = [path.parent for path in ring_paths(run).values()]
            yield View(
                str(run),
                rows,
                is_over=all(r.status.phase in ("ended", "gone") for r in rows),
                limits=as_lines(read_limits(folders)),
            )

    _show(views(run_dir), once=once)
    return 0


def _show_endpoint(args: argparse.Namespace, *, once: bool) -> int:
    endpoint = join(*split(args.place))
    run_dir, job = _run_with(endpoint)
    if run_dir is not None and "rendezvous" not in job:
        return _show_run(run_dir, once=once)
    endpoint = job.get("rendezvous", endpoint)
    if args.rdzv_secret_file is None and not os.environ.get("ECHELON_SECRET") and "secret" in job:
        secret = job["secret"].encode()
    else:
        secret = read_secret(args.rdzv_secret_file, os.environ)
    with contextlib.closing(_dial(endpoint, secret, tls_files(args, None))) as link:
        _show(_views(link, endpoint), once=once)
    return 0


def _run_with(endpoint: str) -> tuple[Path | None, dict[str, str]]:
    """Return the newest run in runs/ with the given endpoint, and the contents of its job file."""
    found: tuple[Path | None, dict[str, str]] = (None, {})
    newest_s = 0.0
    for job_file in _RUNS.glob("*/job*.json"):
        with contextlib.suppress(OSError, ValueError):
            job = json.loads(job_file.read_text())
            begun_s = job_file.stat().st_mtime
            if not isinstance(job, dict) or begun_s < newest_s:
                continue
            words = {name: text for name, text in job.items() if isinstance(text, str)}
            if endpoint in (words.get("endpoint"), words.get("rendezvous")):
                found, newest_s = (job_file.parent, words), begun_s
    return found


def _dial(endpoint: str, secret: bytes, tls: TlsFiles | None) -> GrpcLink:
    from echelon.launcher.control.client import GrpcLink  # gRPC only where needed
    from echelon.launcher.control.messages import Ask

    return GrpcLink(endpoint, secret, Ask(), _DIAL_S, tls=tls)


def _views(link: GrpcLink, endpoint: str) -> Iterator[View]:
    """Request the job's state repeatedly; yield one view per response.

    Raises:
        LaunchError: the job does not answer, or refuses the request.
    """
    from echelon.launcher.control.messages import Ask, JobShown, Statuses

    job, answers = None, list[Statuses]()
    deadline_s = time.monotonic() + _DIAL_S + _ANSWER_S
    while True:
        ready, _, _ = select.select([link.fileno()], [], [], max(0, deadline_s - time.monotonic()))
        for command in link.take():
            if command is None:
                if job is None:
                    raise LaunchError(f"{endpoint}: {link.lost_because or _CLOSED}")
                return  # the job is over
            if isinstance(command, JobShown):
                job, answers = command, []
            elif isinstance(command, Statuses):
                answers.append(command)
        if job is None and not ready:
            raise LaunchError(
                f"{endpoint}: the coordinator did not answer within {_DIAL_S + _ANSWER_S:g} s"
            )
        if job is not None and (len(answers) >= job.num_nodes or not ready):
            title = f"{job.job_id} at {endpoint}: {job.phase}, {job.world_size} ranks"
            title += f", restart {job.restarts}" if job.restarts else ""
            yield View(title, _rows(answers), max(0, job.num_nodes - len(answers)))
            job, answers = None, []
            link.send(Ask())
            deadline_s = time.monotonic() + _ANSWER_S


def _rows(answers: Sequence[Statuses]) -> list[Row]:
    """Return one row per rank. If two responses contain the same rank, the later one is used."""
    rows: dict[int, Row] = {}
    for answer in answers:
        with contextlib.suppress(ValueError):  # a node that runs another version
            for numbers, words in zip(answer.numbers, answer.words, strict=True):
                status = RankStatus.unpack(numbers, words)
                rows[status.rank] = Row(answer.host, status)
    return [rows[rank] for rank in sorted(rows)]


def table(view: View) -> Table:
    """Build the table that the terminal shows."""
    from rich.markup import escape
    from rich.table import Table

    drawn = Table(title=view.title, title_justify="left", box=None, padding=(0, 2, 0, 0))
    has_hosts = any(row.host for row in view.rows)
    left = ("host", "phase", "operation")
    for name in ("rank", *(["host"] if has_hosts else []), "phase", "operation", "seq", "lag",
                 "step", "step time"):  # fmt: skip
        drawn.add_column(name, justify="left" if name in left else "right")
    for row in view.rows:
        status = row.status
        drawn.add_row(
            str(status.rank),
            *([row.host] if has_hosts else []),
            status.phase,
            status.operation or "-",
            "-" if status.sequence is None else str(status.sequence),
            "-" if status.lag_s is None else f"{status.lag_s:.1f} s",
            "-" if status.step is None else str(status.step),
            "-" if status.step_s is None else f"{status.step_s * 1e3:.0f} ms",
        )
    notes = [escape(line) for line in view.limits]
    if view.missing_nodes:
        notes.append(f"{view.missing_nodes} nodes did not answer")
    drawn.caption, drawn.caption_justify = "\n".join(notes) or None, "left"
    return drawn


def _show(views: Iterator[View], *, once: bool) -> None:
    from rich.console import Console
    from rich.live import Live

    console = Console()
    if once:
        console.print(table(next(views)))
        return
    with contextlib.suppress(KeyboardInterrupt), Live(console=console, auto_refresh=False) as live:
        for view in views:
            live.update(table(view), refresh=True)
            if view.is_over:
                return
            time.sleep(_REFRESH_S)
