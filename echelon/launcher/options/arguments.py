"""Define the command-line arguments of `echelon run`."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

from echelon import __version__
from echelon.launcher.node.binding import MODES
from echelon.launcher.options import scheduler
from echelon.launcher.options.ignored import add_ignored
from echelon.launcher.options.logplan import parse_filters, parse_ranks, parse_streams
from echelon.launcher.options.texts import (
    collector,
    listen_at,
    min_max,
    not_negative,
    num_workers,
    positive,
    reader,
    receiver,
    seconds,
    settings,
    signals,
    torch_backend,
    whole,
)
from echelon.recorder.format.schema import DEFAULT_NUM_OPERATIONS

_STOPPING = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"


class Parser(argparse.ArgumentParser):
    """An argument parser that reports an error on a single line, without printing the usage."""

    def error(self, message: str) -> NoReturn:
        """Print one line and exit with code 2."""
        self.exit(2, f"{self.prog}: {message}. See {self.prog} --help\n")

    def check_defaults(self, args: argparse.Namespace) -> None:
        """Check the defaults of options with choices, which argparse does not check.

        Raises:
            SystemExit: a default is not one of the choices. The exit code is 2.
        """
        for action in self._actions:
            value = getattr(args, action.dest, None)
            if action.choices is None or value is None or value in action.choices:
                continue
            known = ", ".join(repr(choice) for choice in action.choices)
            name = f"PET_{action.dest.upper()}"
            self.error(f"{name}: invalid choice: {value!r} (choose from {known})")


def make_parser(environ: Mapping[str, str]) -> Parser:
    """Build the parser; `PET_<OPTION>` in the environment sets an option's default."""
    parser = Parser(
        prog="echelon run",
        description="Launch a training job; explain it if it stalls or dies.",
        usage="echelon run [options] SCRIPT [ARGS ...]",
        allow_abbrev=False,
    )
    default = Defaults(environ)
    parser.add_argument("--version", action="version", version=f"echelon {__version__}")
    job = parser.add_argument_group("the job")
    _add_size_options(job, default)
    _add_failure_options(job, default)
    _add_restart_options(job, default)
    _add_worker_options(job, default)
    _add_placement_options(parser.add_argument_group("placement"), default)
    add_node_options(parser.add_argument_group("many nodes"), default)
    _add_watch_options(parser.add_argument_group("watching"), default)
    _add_notice_options(parser.add_argument_group("notices"), default)
    _add_log_options(parser.add_argument_group("output"), default)
    _add_program_options(parser.add_argument_group("the program"), default)
    add_ignored(parser.add_argument_group("accepted for torchrun compatibility"), default)
    return parser


def _add_size_options(job: argparse._ArgumentGroup, default: Defaults) -> None:
    job.add_argument(
        "--nproc-per-node",
        type=num_workers,
        default=default("nproc_per_node", "1"),
        metavar="N",
        help="workers to start: a number, auto, cpu (one per usable core), gpu or xpu (default 1)",
    )
    default.flag(job, "--standalone", help="run on this node only; ignore multi-node options")


def _add_failure_options(job: argparse._ArgumentGroup, default: Defaults) -> None:
    job.add_argument(
        "--max-restarts",
        type=not_negative,
        default=default("max_restarts", "0"),
        metavar="N",
        help="start all workers again after a failure, at most N times (default 0)",
    )
    job.add_argument(
        "--restart-policy",
        choices=("smart", "always", "never"),
        default=default("restart_policy", "smart"),
        help="smart: restart if, according to the verdict, a restart can help, otherwise stop "
        "(default); always: restart after each failure, as torchrun does; never: like "
        "--max-restarts 0",
    )
    job.add_argument(
        "--on-loss",
        choices=("end", "shrink", "replace"),
        default=default("on_loss", "end"),
        help="end: a rank that dies ends the attempt (default); shrink: if all ranks train with "
        "echelon.dist.resilient.run, the remaining ranks repeat the step and continue; replace: "
        "the same, and a new process takes the lost rank's place, from a standby if one is ready; "
        "the ranks of a node that connects late join, too",
    )
    job.add_argument(
        "--max-replacements",
        type=not_negative,
        default=default("max_replacements", "10"),
        metavar="N",
        help="with --on-loss replace: start at most N such processes in a job (default 10)",
    )
    job.add_argument(
        "--min-ranks",
        type=positive,
        default=default("min_ranks", "1"),
        metavar="N",
        help="with --on-loss shrink or replace: end the attempt if fewer ranks are left "
        "(default 1)",
    )
    job.add_argument(
        "--exclude-after",
        type=not_negative,
        default=default("exclude_after", "2"),
        metavar="N",
        help="avoid a node after N failures of its own if another node can take its place; 0: "
        "never (default 2; with --restart-policy smart)",
    )


def _add_restart_options(job: argparse._ArgumentGroup, default: Defaults) -> None:
    job.add_argument(
        "--before-restart",
        default=default("before_restart", ""),
        metavar="CMD",
        help="shell command that every node runs before a restart, with ECHELON_CAUSE, "
        "ECHELON_CULPRIT_RANKS and others set; if it fails, this is reported and the restart "
        "proceeds",
    )
    job.add_argument(
        "--before-restart-timeout",
        type=seconds,
        default=default("before_restart_timeout", "60"),
        metavar="S",
        help="time limit of --before-restart, in seconds (default 60)",
    )
    job.add_argument(
        "--standby",
        type=not_negative,
        default=default("standby", "0"),
        metavar="N",
        help="keep N processes on each node that have loaded the program's libraries, so that "
        "ranks restart without that delay; each takes their memory (default 0)",
    )


def _add_worker_options(job: argparse._ArgumentGroup, default: Defaults) -> None:
    job.add_argument(
        "--rdzv-id", default=default("rdzv_id", ""), metavar="ID", help="the job's name"
    )
    job.add_argument("--role", default=default("role", "default"), help="name of the workers' role")
    job.add_argument(
        "--shutdown-timeout",
        type=seconds,
        default=default(
            "shutdown_timeout", default.variable("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "10")
        ),
        metavar="S",
        help="seconds between SIGTERM and SIGKILL when workers are stopped (default 10)",
    )
    job.add_argument(
        "--stdin-rank",
        type=whole,
        default=default("stdin_rank", "-1"),
        metavar="R",
        help="the rank that reads the launcher's standard input (default: none does)",
    )
    job.add_argument(
        "--torch-backend",
        type=torch_backend,
        default=default("torch_backend", default.variable("ECHELON_TORCH_BACKEND", "")),
        metavar="NAME",
        help="echelon: torch programs that ask for gloo, or for no backend, get echelon's groups, "
        "which are recorded (default: they get what they ask for)",
    )
    job.add_argument(
        "--signals-to-handle",
        type=signals,
        default=default("signals_to_handle", _STOPPING),
        metavar="S,...",
        help=f"signals that the launcher handles (default {_STOPPING}, which end the job); others "
        "named here are passed to the workers, as SIGUSR1 and SIGUSR2 always are",
    )


def _add_placement_options(place: argparse._ArgumentGroup, default: Defaults) -> None:
    place.add_argument(
        "--numa-binding",
        choices=("", *MODES),
        default=default("numa_binding", ""),
        metavar="MODE",
        help="bind each worker to processors near its GPU: node, socket, exclusive (cores of its "
        "own) or core-complex (one last-level cache)",
    )
    default.flag(
        place,
        "--virtual-local-rank",
        help="set LOCAL_RANK to 0 for all workers, and CUDA_VISIBLE_DEVICES to each worker's GPU",
    )


def add_node_options(nodes: argparse._ArgumentGroup, default: Defaults) -> None:
    """Add the options for multi-node jobs."""
    nodes.add_argument(
        "--nnodes",
        type=min_max,
        default=default("nnodes", "1"),
        metavar="MIN[:MAX]",
        help="number of nodes; with MAX, any number in this range (default 1)",
    )
    nodes.add_argument(
        "--rdzv-endpoint",
        default=default("rdzv_endpoint", ""),
        metavar="HOST:PORT",
        help="where the nodes meet; the node that owns the address hosts the job",
    )
    nodes.add_argument(
        "--rdzv-conf",
        type=settings,
        default=default("rdzv_conf", ""),
        metavar="K=V,...",
        help="is_host=true|false, join_timeout=S (default 600), last_call_timeout=S, "
        "lost_after=S (silence after which a node counts as lost, default 15; the host's value "
        "applies), failover=true|false (another node hosts the job if the hosting one is lost)",
    )
    nodes.add_argument(
        "--rdzv-witness",
        default=default("rdzv_witness", ""),
        metavar="HOST[:PORT]",
        help="an `echelon witness` on a third machine: it votes if the number of nodes is even, so "
        "that one of two nodes may replace the other (with failover=true; the host's value "
        "applies)",
    )
    nodes.add_argument(
        "--rdzv-secret-file",
        type=Path,
        default=default("rdzv_secret_file", None),
        metavar="FILE",
        help="file with the secret that all nodes of the job share; or set ECHELON_SECRET",
    )
    for name, what in (
        ("cert", "this node's TLS certificate"),
        ("key", "the certificate's private key"),
        ("ca", "the CA certificate that signed the other nodes' certificates"),
    ):
        nodes.add_argument(
            f"--rdzv-{name}",
            type=Path,
            default=default(f"rdzv_{name}", None),
            metavar="FILE",
            help=f"{what} (PEM); with all three, nodes use TLS",
        )
    nodes.add_argument(
        "--node-rank",
        type=whole,
        default=default("node_rank", "-1"),
        metavar="R",
        help="this node's position; 0 hosts the job (default: ordered by host name)",
    )
    nodes.add_argument(
        "--master-addr", default=default("master_addr", ""), metavar="HOST", help="as in torchrun"
    )
    nodes.add_argument(
        "--master-port",
        type=not_negative,
        default=default("master_port", "0"),
        metavar="PORT",
        help="as in torchrun",
    )
    nodes.add_argument(
        "--bind",
        default=default("bind", ""),
        metavar="ADDRESS",
        help="address to bind on the hosting node (default: the endpoint's, if it is local)",
    )
    nodes.add_argument(
        "--spares",
        type=not_negative,
        default=default("spares", "0"),
        metavar="N",
        help="number of standby nodes beyond MAX that replace lost ones (default 0)",
    )


def _add_watch_options(watch: argparse._ArgumentGroup, default: Defaults) -> None:
    watch.add_argument(
        "--stall-timeout",
        type=seconds,
        default=default("stall_timeout", "60"),
        metavar="S",
        help="report a stall after S seconds without progress (default 60)",
    )
    watch.add_argument(
        "--on-stall",
        choices=("report", "stop", "restart", "replace"),
        default=default("on_stall", "report"),
        help="report: print the verdict and let the job continue (default); stop: end the job; "
        "restart: end the ranks and restart them as after a failure; replace: end only the ranks "
        "that hang, as --on-loss continues without them, and restart if the verdict is unsure",
    )
    watch.add_argument(
        "--learned-limits",
        choices=("on", "off"),
        default=default("learned_limits", "on"),
        help="on: examine the ranks, without stopping them, as soon as an operation takes longer "
        "than its history suggests while no rank makes progress; wait longer for phases that took "
        "long before (default); off: use --stall-timeout alone",
    )
    watch.add_argument(
        "--run-dir",
        type=Path,
        default=default("run_dir", None),
        metavar="DIR",
        help="directory for all files of the job (default runs/<time>-<id>)",
    )
    watch.add_argument(
        "--checkpoint-dir",
        type=Path,
        default=default("checkpoint_dir", None),
        metavar="DIR",
        help="directory of the job's checkpoints; ECHELON_RESUME is set to the newest complete one "
        "(default: the last one that rank 0 saved in this run directory)",
    )
    watch.add_argument(
        "--recorder-size",
        type=not_negative,
        default=default("recorder_size", str(DEFAULT_NUM_OPERATIONS)),
        metavar="N",
        help="number of operations that each rank's black box keeps; 0 turns it off (default 4096)",
    )


def _add_notice_options(notices: argparse._ArgumentGroup, default: Defaults) -> None:
    given = default("notify", None)
    notices.add_argument(
        "--notify",
        type=receiver,
        action="append",
        default=[] if given is None else [receiver(given)],
        metavar="CMD|URL",
        help="send each verdict, each restart and the job's end as JSON, to the stdin of a shell "
        "command or as a POST to an http(s) URL; may be repeated (the host's values apply)",
    )
    notices.add_argument(
        "--metrics",
        type=listen_at,
        default=default("metrics", None),
        metavar="[ADDRESS:]PORT",
        help="serve Prometheus metrics at /metrics on the hosting node; without an address, on "
        "loopback only",
    )
    notices.add_argument(
        "--otlp",
        type=collector,
        default=default("otlp", ""),
        metavar="URL|env",
        help="send metrics, verdicts, restarts and the job's end by OTLP over HTTP to a collector, "
        "such as http://HOST:4318; env: to the endpoint of the OTEL_* variables",
    )


def _add_log_options(logs: argparse._ArgumentGroup, default: Defaults) -> None:
    streams = reader(parse_streams)
    logs.add_argument(
        "-r",
        "--redirects",
        type=streams,
        default=default("redirects", ""),
        metavar="S",
        help="write streams to files only: 1 stdout, 2 stderr, 3 both; or 0:3,8-15:1 by local rank",
    )
    logs.add_argument(
        "-t",
        "--tee",
        type=streams,
        default=default("tee", ""),
        metavar="S",
        help="also show redirected streams (same syntax as -r)",
    )
    logs.add_argument(
        "--local-ranks-filter",
        type=reader(parse_ranks),
        default=default("local_ranks_filter", None),
        metavar="RANKS",
        help="show only these local ranks, such as 0,2,8-15",
    )
    logs.add_argument(
        "--log-dir",
        type=Path,
        default=default("log_dir", None),
        metavar="DIR",
        help="keep logs in torchrun's layout below DIR instead of in the run directory",
    )
    for name in ("stdout", "stderr"):
        logs.add_argument(
            f"--duplicate-{name}-filters",
            type=parse_filters,
            default=default(f"duplicate_{name}_filters", ""),
            metavar="TEXT,...",
            help=f"also write {name} lines that contain one of these to filtered_{name}.log",
        )
    logs.add_argument(
        "--log-format",
        choices=("text", "json"),
        default=default("log_format", "text"),
        help="json: print each line as an object with node, rank, stream and line",
    )
    default.flag(
        logs,
        "--fold-lines",
        help="if many ranks print the same line at about the same time, show it once",
    )


def _add_program_options(program: argparse._ArgumentGroup, default: Defaults) -> None:
    default.flag(program, "-m", "--module", help="SCRIPT is a Python module")
    default.flag(program, "--no-python", help="SCRIPT is a program; run it directly")
    default.flag(program, "--run-path", help="SCRIPT is a Python script, even with --no-python")


class Defaults:
    """The options' defaults, from `PET_<OPTION>`, else from the scheduler, else echelon's own.

    String values are parsed as if they were given on the command line.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ
        self._scheduler = scheduler.defaults(environ)

    def flag(self, group: argparse._ArgumentGroup, *names: str, help: str) -> None:  # noqa: A002
        """Add an option without a value; setting `PET_<OPTION>=1` has the same effect."""
        is_set = self.is_set(names[-1].removeprefix("--").replace("-", "_"))
        group.add_argument(*names, action="store_true", default=is_set, help=help)

    def is_set(self, name: str) -> bool:
        """Return whether `PET_<OPTION>` is set to 1, true or yes."""
        return self._environ.get(f"PET_{name.upper()}", "0").lower() in ("1", "true", "yes")

    def variable(self, name: str, default: str) -> str:
        """Return an option's default from the environment variable `name`, or else `default`.

        Unlike `__call__`, this method does not read `PET_<OPTION>`.
        """
        return self._environ.get(name, default)

    def __call__(self, name: str, default: str | None) -> str | None:
        """Return an option's default from `PET_<OPTION>` or the scheduler, or else `default`."""
        return self._environ.get(f"PET_{name.upper()}", self._scheduler.get(name, default))
