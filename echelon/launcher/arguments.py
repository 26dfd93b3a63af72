"""The arguments of `echelon run`, one by one, and how their texts are read."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NoReturn, TypeVar

from echelon import __version__
from echelon.launcher import scheduler
from echelon.launcher.logplan import parse_filters, parse_ranks, parse_streams
from echelon.recorder.schema import DEFAULT_NUM_OPERATIONS

_T = TypeVar("_T")
_MAX_LOCAL_RANKS = 4096


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line; the usage is `--help`'s to show."""

    def error(self, message: str) -> NoReturn:
        """End with code 2 after one line."""
        self.exit(2, f"{self.prog}: {message}. See {self.prog} --help\n")


def make_parser(environ: Mapping[str, str]) -> Parser:
    """Describe the options; `PET_<OPTION>` in the environment gives a default."""
    parser = Parser(
        prog="echelon run",
        description="Launch a training job; explain it if it stalls or dies.",
        usage="echelon run [options] SCRIPT [ARGS ...]",
        allow_abbrev=False,
    )
    try:
        default = _Defaults(environ)
    except ValueError as err:
        parser.error(str(err))
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
    _add_log_options(parser.add_argument_group("output"), default)
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
        help="is_host=true|false, join_timeout=S (default 600), last_call_timeout=S",
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


def _add_log_options(logs: argparse._ArgumentGroup, default: _Defaults) -> None:
    streams = _reader(parse_streams)
    logs.add_argument(
        "-r",
        "--redirects",
        type=streams,
        default=default("redirects", ""),
        metavar="S",
        help="keep streams in files only: 1 stdout, 2 stderr, 3 both; or 0:3,8-15:1 by local rank",
    )
    logs.add_argument(
        "-t",
        "--tee",
        type=streams,
        default=default("tee", ""),
        metavar="S",
        help="show redirected streams all the same (same form)",
    )
    logs.add_argument(
        "--local-ranks-filter",
        type=_reader(parse_ranks),
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
            help=f"write {name} lines with one of these in them to filtered_{name}.log too",
        )
    logs.add_argument(
        "--log-format",
        choices=("text", "json"),
        default=default("log_format", "text"),
        help="json: each line as an object with node, rank, stream and line",
    )
    logs.add_argument(
        "--fold-lines",
        action="store_true",
        help="show a line that many ranks print at about the same time once",
    )


class _Defaults:
    """Defaults: `PET_<OPTION>`, else what the scheduler says, else ours.

    argparse checks strings as if they were typed.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ
        self._scheduler = scheduler.defaults(environ)

    def __call__(self, name: str, default: str | None) -> str | None:
        return self._environ.get(f"PET_{name.upper()}", self._scheduler.get(name, default))


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


def _reader(parse: Callable[[str], _T]) -> Callable[[str], _T]:
    """Let a parser's ValueError be shown as it is."""

    def read(text: str) -> _T:
        try:
            return parse(text)
        except ValueError as err:
            raise argparse.ArgumentTypeError(str(err)) from None

    return read


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
