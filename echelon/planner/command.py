"""Implement `echelon plan`, which lists the layouts that fit in memory, fastest first."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from echelon import __version__
from echelon.planner.layout import Job
from echelon.planner.machine import Machine, assumed, read_machine, with_peak
from echelon.planner.model import PRESETS, read_model
from echelon.planner.planner import plan
from echelon.planner.report import as_json, as_text

_GIB = 1 << 30
_NODE_RANKS = 8


def build_parser() -> argparse.ArgumentParser:
    """Return the command's argument parser."""
    parser = argparse.ArgumentParser(
        prog="echelon plan",
        description="List the layouts of a training that fit into memory, the fastest first.",
        epilog="Measure links and processors with: echelon run --nproc-per-node N "
        "-m echelon.planner.measure --out links.json",
    )
    add = parser.add_argument
    add("--version", action="version", version=f"echelon {__version__}")
    add("--model", required=True, help=f"{', '.join(PRESETS)}; layers=..,width=..,heads=..; or a "
        "Hugging Face config.json")  # fmt: skip
    add("--ranks", type=int, required=True, help="ranks of the whole job")
    add("--memory", type=float, required=True, metavar="GIB", help="of one rank")
    add("--ranks-per-node", type=int, metavar="M", help="neighbors with fast links (8)")
    add("--batch", type=int, help="sequences per step of all ranks together (one per rank)")
    add("--context", type=int, help="tokens of a sequence (the model's, at most 4096)")
    add("--precision", choices=("fp32", "bf16"), default="bf16", help="to compute in (bf16)")
    add("--device", choices=("accelerator", "cpu"), default="accelerator",
        help="whose memory ranks take (accelerator)")  # fmt: skip
    add("--loss-chunks", type=int, default=1, metavar="N", help="parts of the loss (1)")
    add("--links", metavar="FILE", help="what echelon.planner.measure wrote")
    add("--peak-tflops", type=float, metavar="T", help="of one rank, in this precision")
    add("--top", type=int, default=10, metavar="N", help="layouts to show (10)")
    add("--json", action="store_true", help="print everything as JSON")
    return parser


def main(argv: Sequence[str]) -> int:
    """Run the command; return 0 on success, or 1 if no layout fits.

    Incorrect usage raises `SystemExit` with status 2.
    """
    parser = build_parser()
    args = parser.parse_args(argv)
    try:
        model = read_model(args.model)
        job = _job(args, model.context)
        machine = _machine(args)
        memory_bytes = args.memory * _GIB
        if not memory_bytes > 0:
            raise ValueError(f"--memory must be above 0, got {args.memory:g}")
        outcome = plan(model, job, machine, memory_bytes)
    except (ValueError, OSError) as err:
        parser.error(str(err))
    if args.json:
        json.dump(as_json(job, machine, outcome), sys.stdout, indent=1)
        print()
    else:
        print(as_text(model, job, machine, outcome, memory_bytes, max(1, args.top)))
    return 0 if outcome.candidates else 1


def _job(args: argparse.Namespace, context: int) -> Job:
    per_node = args.ranks_per_node
    if per_node is None:
        per_node = min(_NODE_RANKS, args.ranks)
    return Job(
        ranks=args.ranks,
        ranks_per_node=per_node,
        batch=args.ranks if args.batch is None else args.batch,
        context=min(context, 4096) if args.context is None else args.context,
        compute_bytes=2 if args.precision == "bf16" else 4,
        loss_chunks=args.loss_chunks,
        on_host=args.device == "cpu",
    )


def _machine(args: argparse.Namespace) -> Machine:
    machine = assumed(is_half=args.precision == "bf16")
    if args.links:
        machine = read_machine(args.links, machine)
    if args.peak_tflops is not None:
        machine = with_peak(machine, args.peak_tflops)
    return machine
