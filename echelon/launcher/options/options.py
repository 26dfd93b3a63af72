"""Parse the options of `echelon run`, which include torchrun's options.

Every option can also be set through the environment variable `PET_<OPTION>`. The command line takes
precedence. An invalid value is reported in one line, and the launcher exits with code 2.
"""

from __future__ import annotations

import argparse
import os
import secrets
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from echelon.launcher.control.conf import Conf, read_conf
from echelon.launcher.control.endpoint import WITNESS_PORT, Rendezvous, join, rendezvous, split
from echelon.launcher.control.tls import TlsFiles, tls_files
from echelon.launcher.options import scheduler
from echelon.launcher.options.arguments import Parser, make_parser
from echelon.launcher.options.ignored import notes_on_ignored
from echelon.launcher.options.logplan import LogPlan


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """The user's settings for a job."""

    program: tuple[str, ...]  # the command line of a worker, including the interpreter
    nproc_per_node: int
    min_nodes: int
    max_nodes: int
    spares: int
    node_name: str  # unique for this launcher
    node_rank: int  # -1: any
    rendezvous: Rendezvous | None  # None if the job has one node
    conf: Conf
    witness: str  # "host:port"; "" if there is none
    tls: TlsFiles | None
    role: str
    logs: LogPlan
    max_restarts: int
    before_restart: str  # a shell command; "": none
    before_restart_timeout_s: float
    standby: int  # processes to keep ready on each node
    restart_policy: str  # "smart", "always" or "never"
    exclude_after: int  # avoid a node after this many failures; 0: never
    stall_timeout_s: float
    on_stall: str  # "report", "stop", "restart" or "replace"
    on_loss: str  # "end", "shrink" or "replace"
    max_replacements: int
    min_ranks: int  # the least number of ranks that may continue after losses
    learned_limits: str  # "on" or "off"
    run_dir: Path | None
    checkpoint_dir: Path | None  # None: use what the ranks announce
    rdzv_id: str
    shutdown_timeout_s: float
    signals: tuple[signal.Signals, ...]  # that the launcher handles itself
    numa_binding: str  # "": none
    virtual_local_rank: bool
    recorder_size: int
    stdin_rank: int  # -1: no worker reads the launcher's stdin
    torch_backend: str  # the replacement for gloo in torch programs; "": none
    notify: tuple[str, ...]  # commands and URLs that get notices
    metrics: tuple[str, int] | None  # address and port of the endpoint
    otlp: str  # where metrics and notices are sent: a URL, "env", or "" for nowhere
    notes: tuple[str, ...]  # lines for the user about options without effect


def parse(argv: Sequence[str], environ: Mapping[str, str]) -> Options:
    """Parse the command line of `echelon run`.

    Raises:
        SystemExit: the arguments are invalid (exit code 2), or contain --help or --version (exit
            code 0).
    """
    parser = make_parser(environ)
    options, program = _split(argv)
    args = parser.parse_args([dashes(text) for text in options])
    parser.check_defaults(args)
    try:
        conf = read_conf(args.rdzv_conf)
        meeting = rendezvous(args, conf, environ)
        tls = tls_files(args, meeting)
        witness = _witness(args, conf, meeting)
    except ValueError as err:
        parser.error(str(err))
    if args.on_loss != "end" and meeting is None and args.min_ranks > args.nproc_per_node:
        ranks = "1 rank" if args.nproc_per_node == 1 else f"{args.nproc_per_node} ranks"
        parser.error(f"--min-ranks {args.min_ranks}: the job has only {ranks}")
    misused = scheduler.misuse(environ)
    if misused and meeting is not None:
        parser.error(misused)
    return Options(
        program=_program(parser, args, program),
        nproc_per_node=args.nproc_per_node,
        min_nodes=args.nnodes[0],
        max_nodes=args.nnodes[1],
        spares=args.spares,
        node_name=f"{socket.gethostname()}-{secrets.token_hex(4)}",
        node_rank=args.node_rank,
        rendezvous=meeting,
        conf=conf,
        witness=witness,
        tls=tls,
        role=args.role,
        logs=LogPlan(
            redirects=args.redirects,
            tee=args.tee,
            shown_ranks=args.local_ranks_filter,
            log_dir=args.log_dir,
            filters={1: args.duplicate_stdout_filters, 2: args.duplicate_stderr_filters},
            as_json=args.log_format == "json",
            fold=args.fold_lines,
        ),
        max_restarts=args.max_restarts,
        before_restart=args.before_restart,
        before_restart_timeout_s=args.before_restart_timeout,
        standby=0 if args.no_python and not args.run_path else args.standby,
        restart_policy=args.restart_policy,
        exclude_after=args.exclude_after,
        stall_timeout_s=args.stall_timeout,
        on_stall=args.on_stall,
        on_loss=args.on_loss,
        max_replacements=args.max_replacements,
        min_ranks=args.min_ranks,
        learned_limits=args.learned_limits,
        run_dir=args.run_dir,
        checkpoint_dir=args.checkpoint_dir,
        rdzv_id=args.rdzv_id,
        shutdown_timeout_s=args.shutdown_timeout,
        signals=args.signals_to_handle,
        numa_binding=args.numa_binding,
        virtual_local_rank=args.virtual_local_rank,
        recorder_size=args.recorder_size,
        stdin_rank=args.stdin_rank,
        torch_backend=args.torch_backend,
        notify=tuple(args.notify),
        metrics=args.metrics,
        otlp=args.otlp,
        notes=(*notes_on_ignored(args), *conf.notes, *_without_effect(args, meeting)),
    )


def _witness(args: argparse.Namespace, conf: Conf, meeting: Rendezvous | None) -> str:
    """Return the witness's endpoint as "host:port", or "" if the job has no witness.

    Raises:
        ValueError: the endpoint is malformed, or failover is disabled.
    """
    if not args.rdzv_witness or meeting is None:
        return ""
    if not conf.failover:
        raise ValueError("--rdzv-witness needs --rdzv-conf failover=true on all nodes")
    return join(*split(args.rdzv_witness, WITNESS_PORT, "--rdzv-witness"))


def _without_effect(args: argparse.Namespace, meeting: Rendezvous | None) -> list[str]:
    """Return one line for each option that has no effect in this job."""
    notes = []
    if args.min_ranks != 1 and args.on_loss == "end":
        notes.append("--min-ranks has no effect without --on-loss shrink or replace")
    elif args.on_loss == "end" or meeting is not None:
        pass  # on several nodes, the number of ranks is known only once they have met
    elif args.nproc_per_node == 1:
        notes.append(f"--on-loss {args.on_loss} has no effect: no rank is left after a loss")
    elif args.min_ranks == args.nproc_per_node:
        notes.append(f"--on-loss {args.on_loss} has no effect: --min-ranks allows no loss")
    if args.max_replacements != 10 and args.on_loss != "replace":
        notes.append("--max-replacements has no effect without --on-loss replace")
    if args.on_stall == "replace" and args.on_loss == "end":
        notes.append("--on-stall replace works as restart without --on-loss shrink")
    if args.standby and args.no_python and not args.run_path:
        notes.append("--standby has no effect with --no-python: only Python programs have standbys")
    return notes + _without_effect_alone(args, meeting)


def _without_effect_alone(args: argparse.Namespace, meeting: Rendezvous | None) -> list[str]:
    """Return one line for each option that has no effect on a single node."""
    if meeting is not None:
        return []
    given = {
        "--master-port": args.master_port,
        "--bind": args.bind,
        "--spares": args.spares,
        "--rdzv-cert": args.rdzv_cert,
        "--rdzv-key": args.rdzv_key,
        "--rdzv-ca": args.rdzv_ca,
        "--rdzv-secret-file": args.rdzv_secret_file,
        "--rdzv-witness": args.rdzv_witness,
    }
    return [f"{name} has no effect on a single node" for name, value in given.items() if value]


_FLAGS = frozenset(
    {
        "-h", "--help", "--version", "--standalone", "-m", "--module", "--no-python", "--run-path",
        "--fold-lines", "--virtual-local-rank",
    }
)  # fmt: skip


def _split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split the command line into the launcher's options and the script with its arguments."""
    at = 0
    while at < len(argv) and argv[at].startswith("-"):
        name = argv[at]
        attached = "=" in name or (not name.startswith("--") and len(name) > 2)  # -r3
        takes_value = not attached and name.replace("_", "-") not in _FLAGS
        at += 2 if takes_value else 1
    return list(argv[:at]), list(argv[at:])


def dashes(text: str) -> str:
    """Replace `_` with `-` in an option's name, so `--log_dir=a_b` becomes `--log-dir=a_b`."""
    if not text.startswith("--"):
        return text
    name, equals, value = text.partition("=")
    return name.replace("_", "-") + equals + value


def _program(parser: Parser, args: argparse.Namespace, program: Sequence[str]) -> tuple[str, ...]:
    if not program:
        parser.error("no SCRIPT given")
    if args.module and args.no_python:
        parser.error("-m and --no-python are mutually exclusive")
    if args.no_python and not args.run_path:
        return tuple(program)
    python = os.environ.get("PYTHON_EXEC", sys.executable)  # torchrun's variable
    if args.module:
        return (python, "-u", "-m", *program)
    if not Path(program[0]).is_file():
        parser.error(f"no such script: {program[0]}")
    return (python, "-u", *program)
