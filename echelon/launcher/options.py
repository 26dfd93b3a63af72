"""The options of `echelon run`: torchrun's names, with `-` or `_`, and ours.

Every option is also an environment variable `PET_<OPTION>`; the command line wins. A bad value is
one line and exit code 2.
"""

from __future__ import annotations

import argparse
import os
import secrets
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from echelon import __version__
from echelon.launcher.endpoint import Rendezvous, rendezvous
from echelon.recorder.schema import DEFAULT_NUM_OPERATIONS

_MAX_LOCAL_RANKS = 4096
_JOIN_TIMEOUT_S = 600.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """What the user asked for."""

    program: tuple[str, ...]  # the command line of a worker, interpreter included
    nproc_per_node: int
    min_nodes: int
    max_nodes: int
    spares: int
    node_name: str  # unique for this launcher
    node_rank: int  # -1: any
    rendezvous: Rendezvous | None  # None: one node, nobody to meet
    join_timeout_s: float
    role: str
    max_restarts: int
    stall_timeout_s: float
    on_stall: str  # "report" or "stop"
    run_dir: Path | None
    rdzv_id: str
    shutdown_timeout_s: float
    recorder_size: int


def parse(argv: Sequence[str], environ: Mapping[str, str]) -> Options:
    """Read the command line of `echelon run`.

    Raises:
        SystemExit: with code 2 after one line for bad usage; with 0 for --help and --version.
    """
    parser = _parser(environ)
    options, program = _split(argv)
    args = parser.parse_args([_dashes(text) for text in options])
    try:
        meeting = rendezvous(args, environ)
    except ValueError as err:
        parser.error(str(err))
    return Options(
        program=_program(parser, args, program),
        nproc_per_node=args.nproc_per_node,
        min_nodes=args.nnodes[0],
        max_nodes=args.nnodes[1],
        spares=args.spares,
        node_name=f"{socket.gethostname()}-{secrets.token_hex(4)}",
        node_rank=args.node_rank,
        rendezvous=meeting,
        join_timeout_s=args.rdzv_conf.get("join_timeout", _JOIN_TIMEOUT_S),
        role=args.role,
        max_restarts=args.max_restarts,
        stall_timeout_s=args.stall_timeout,
        on_stall=args.on_stall,
        run_dir=args.run_dir,
        rdzv_id=args.rdzv_id,
        shutdown_timeout_s=args.shutdown_timeout,
        recorder_size=args.recorder_size,
    )


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line; the usage is `--help`'s to show."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}. See {self.prog} --help\n")


def _parser(environ: Mapping[str, str]) -> _Parser:
    parser = _Parser(
        prog="echelon run",
        description="Launch a training job; explain it if it stalls or dies.",
        usage="echelon run [options] SCRIPT [ARGS ...]",
        allow_abbrev=False,
    )
    default = _Defaults(environ)
    parser.add_argument("--version", action="version", version=f"echelon {__version__}")
    job = parser.add_argument_group("the job")
    job.add_argument(
        "--nproc-per-node",
        type=_num_workers,
        default=default("nproc_per_node", "1"),
        metavar="N",
        help="workers to start: a number, auto, cpu (one per usable core) or gpu (default 1)",
    )
    job.add_argument("--standalone", action="store_true", help="accepted: one node is the default")
    job.add_argument(
        "--max-restarts",
        type=_not_negative,
        default=default("max_restarts", "0"),
        metavar="N",
        help="start all workers again after a failure, at most N times (default 0)",
    )
    job.add_argument(
        "--rdzv-id", default=default("rdzv_id", ""), metavar="ID", help="the job's name"
    )
    job.add_argument("--role", default=default("role", "default"), help="name of the workers' role")
    job.add_argument(
        "--shutdown-timeout",
        type=_seconds,
        default=default("shutdown_timeout", "10"),
        metavar="S",
        help="seconds between SIGTERM and SIGKILL when workers are stopped (default 10)",
    )
    _add_node_options(parser.add_argument_group("many nodes"), default)
    watch = parser.add_argument_group("watching")
    watch.add_argument(
        "--stall-timeout",
        type=_seconds,
        default=default("stall_timeout", "60"),
        metavar="S",
        help="an operation pending or silence for so long is a stall (default 60)",
    )
    watch.add_argument(
        "--on-stall",
        choices=("report", "stop"),
        default=default("on_stall", "report"),
        help="report: print the verdict and let the job go on (default); stop: end the job",
    )
    watch.add_argument(
        "--run-dir",
        type=Path,
        default=default("run_dir", None),
        metavar="DIR",
        help="where everything of the job goes (default runs/<time>-<id>)",
    )
    watch.add_argument(
        "--recorder-size",
        type=_not_negative,
        default=default("recorder_size", str(DEFAULT_NUM_OPERATIONS)),
        metavar="N",
        help="operations that each rank's black box keeps; 0 turns it off (default 4096)",
    )
    program = parser.add_argument_group("the program")
    program.add_argument("-m", "--module", action="store_true", help="SCRIPT is a Python module")
    program.add_argument("--no-python", action="store_true", help="SCRIPT is run as it is")
    return parser


def _add_node_options(nodes: argparse._ArgumentGroup, default: _Defaults) -> None:
    nodes.add_argument(
        "--nnodes",
        type=_min_max,
        default=default("nnodes", "1"),
        metavar="MIN[:MAX]",
        help="nodes of the job; with MAX, as many as come (default 1)",
    )
    nodes.add_argument(
        "--rdzv-endpoint",
        default=default("rdzv_endpoint", ""),
        metavar="HOST:PORT",
        help="where the nodes meet; the node that owns the address hosts the job",
    )
    nodes.add_argument(
        "--rdzv-backend",
        default=default("rdzv_backend", "echelon"),
        metavar="NAME",
        help="accepted for torchrun's sake: there is one",
    )
    nodes.add_argument(
        "--rdzv-conf",
        type=_settings,
        default=default("rdzv_conf", ""),
        metavar="K=V,...",
        help="is_host=true|false, join_timeout=S (default 600)",
    )
    nodes.add_argument(
        "--rdzv-secret-file",
        type=Path,
        default=default("rdzv_secret_file", None),
        metavar="FILE",
        help="the secret that all nodes of the job share; or set ECHELON_SECRET",
    )
    nodes.add_argument(
        "--node-rank",
        type=_whole,
        default=default("node_rank", "-1"),
        metavar="R",
        help="this node's place; 0 hosts the job (default: by host name)",
    )
    nodes.add_argument(
        "--master-addr", default=default("master_addr", ""), metavar="HOST", help="as in torchrun"
    )
    nodes.add_argument(
        "--master-port",
        type=_not_negative,
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
        type=_not_negative,
        default=default("spares", "0"),
        metavar="N",
        help="nodes beyond MAX that may wait to replace a lost one (default 0)",
    )


class _Defaults:
    """Defaults that `PET_<OPTION>` overrides; argparse checks strings as if they were typed."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ

    def __call__(self, name: str, default: str | None) -> str | None:
        return self._environ.get(f"PET_{name.upper()}", default)


_FLAGS = frozenset({"-h", "--help", "--version", "--standalone", "-m", "--module", "--no-python"})


def _split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split the command line at the script: what follows it is the script's own."""
    at = 0
    while at < len(argv) and argv[at].startswith("-"):
        takes_value = "=" not in argv[at] and argv[at].replace("_", "-") not in _FLAGS
        at += 2 if takes_value else 1
    return list(argv[:at]), list(argv[at:])


def _dashes(text: str) -> str:
    """`--nproc_per_node=2` is `--nproc-per-node=2`; only option names are touched."""
    if not text.startswith("--"):
        return text
    name, equals, value = text.partition("=")
    return name.replace("_", "-") + equals + value


def _num_workers(text: str) -> int:
    if text in ("auto", "gpu", "cpu"):
        num_gpus = len(list(Path("/dev").glob("nvidia[0-9]*")))
        if text == "gpu" and not num_gpus:
            raise argparse.ArgumentTypeError("gpu: no NVIDIA device on this machine")
        return num_gpus if num_gpus and text != "cpu" else len(os.sched_getaffinity(0))
    try:
        number = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number, auto, cpu or gpu") from None
    if not 1 <= number <= _MAX_LOCAL_RANKS:
        raise argparse.ArgumentTypeError(f"{number} is not between 1 and {_MAX_LOCAL_RANKS}")
    return number


def _not_negative(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number") from None
    if number < 0:
        raise argparse.ArgumentTypeError(f"{number} is below 0")
    return number


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds") from None
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def _min_max(text: str) -> tuple[int, int]:
    low, _, high = text.partition(":")
    try:
        least, most = int(low), int(high or low)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not MIN or MIN:MAX") from None
    if not 1 <= least <= most:
        raise argparse.ArgumentTypeError(f"{text}: must be 1 <= MIN <= MAX")
    return least, most


def _settings(text: str) -> dict[str, float]:
    settings: dict[str, float] = {}
    for pair in text.split(",") if text else []:
        name, equals, value = pair.partition("=")
        try:
            settings[name] = float({"true": "1", "false": "0"}.get(value.lower(), value))
        except ValueError:
            equals = ""
        if not equals:
            raise argparse.ArgumentTypeError(f"{pair!r} is not NAME=VALUE")
    return settings


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number") from None


def _program(parser: _Parser, args: argparse.Namespace, program: Sequence[str]) -> tuple[str, ...]:
    if not program:
        parser.error("no SCRIPT given")
    if args.module and args.no_python:
        parser.error("-m and --no-python exclude each other")
    if args.no_python:
        return tuple(program)
    if args.module:
        return (sys.executable, "-u", "-m", *program)
    if not Path(program[0]).is_file():
        parser.error(f"no such script: {program[0]}")
    return (sys.executable, "-u", *program)
