"""Show, check and search for schedules: `python -m echelon.dist.pipeline`. Does not need torch."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from echelon.dist.pipeline.plan.catalog import NAMES, schedule
from echelon.dist.pipeline.plan.lower import add_messages, add_sharding
from echelon.dist.pipeline.plan.plan import Plan, counted
from echelon.dist.pipeline.simulation.costs import Costs
from echelon.dist.pipeline.simulation.grid import draw_grid, draw_summary
from echelon.dist.pipeline.simulation.picture import draw_svg
from echelon.dist.pipeline.simulation.search import Load, search
from echelon.dist.pipeline.simulation.simulator import simulate
from echelon.dist.pipeline.simulation.trace import draw_trace


def main(argv: list[str] | None = None) -> int:
    """Run a command; return 0 on success, or 1 for an invalid argument, plan or file.

    Incorrect usage raises `SystemExit` with status 2.
    """
    arguments = _parser().parse_args(argv)
    try:
        run = {"show": _show, "check": _check, "search": _search}[arguments.command]
        run(arguments)
    except (ValueError, OSError) as err:
        print(f"pipeline {arguments.command}: {err}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m echelon.dist.pipeline", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    show = commands.add_parser("show", help="draw a schedule's steps and print its cost")
    show.add_argument("schedule", help=f"{', '.join(NAMES)}, or a CSV file")
    _add_sizes(show)
    show.add_argument("-v", "--chunks", type=int, help="stages per rank")
    show.add_argument("--svg", type=Path, help="write a picture")
    show.add_argument("--trace", type=Path, help="write a Chrome trace")
    show.add_argument("--csv", type=Path, help="write the plan in PyTorch's CSV")
    show.add_argument(
        "--lowered", action="store_true", help="include messages and sharding actions in the CSV"
    )
    check = commands.add_parser("check", help="check whether a plan in a CSV file can be executed")
    check.add_argument("file", type=Path)
    find = commands.add_parser("search", help="find the best schedule for costs and a memory limit")
    _add_sizes(find)
    find.add_argument("--max-chunks", type=int, default=4, help="maximum number of stages per rank")
    find.add_argument("--overhead", type=float, default=0.0, help="time added to each action")
    find.add_argument(
        "--activation-bytes",
        type=float,
        default=0.0,
        help="activations of a rank's share of the model, for one micro-batch",
    )
    find.add_argument(
        "--message-bytes", type=float, default=0.0, help="size of a message for one micro-batch"
    )
    find.add_argument(
        "--bandwidth", type=float, default=float("inf"), help="bytes per unit of time"
    )
    find.add_argument(
        "--memory-bytes", type=float, default=float("inf"), help="memory limit per rank"
    )
    return parser


def _add_sizes(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-p", "--ranks", type=int, default=4)
    parser.add_argument("-m", "--microbatches", type=int, default=8)
    share = "for a rank's share of the model"
    parser.add_argument("--forward", type=float, default=1.0, help=f"time {share}")
    parser.add_argument("--input-grad", type=float, default=1.0, help=f"time {share}")
    parser.add_argument("--weight-grad", type=float, default=1.0, help=f"time {share}")
    parser.add_argument("--latency", type=float, default=0.0, help="time added to each message")


def _plan(arguments: argparse.Namespace) -> Plan:
    if arguments.schedule.endswith(".csv"):
        return Plan.load(arguments.schedule)
    return schedule(
        arguments.schedule, arguments.ranks, arguments.microbatches, arguments.chunks
    )  # fmt: skip


def _show(arguments: argparse.Namespace) -> None:
    plan = _plan(arguments)
    chunks = plan.num_chunks  # a chunk's action costs its part of the share's
    costs = Costs(
        forward=arguments.forward / chunks,
        input_grad=arguments.input_grad / chunks,
        weight_grad=arguments.weight_grad / chunks,
        latency=arguments.latency,
    )
    simulation = simulate(plan, costs=costs)
    print(draw_grid(simulation))
    print(draw_summary(simulation))
    if arguments.svg:
        arguments.svg.write_text(draw_svg(simulation))
    if arguments.trace:
        arguments.trace.write_text(draw_trace(simulation))
    if arguments.csv:
        (add_sharding(add_messages(plan)) if arguments.lowered else plan).save(arguments.csv)


def _check(arguments: argparse.Namespace) -> None:
    plan = Plan.load(arguments.file)
    print(
        f"{arguments.file} is a valid plan: {counted(plan.num_ranks, 'rank')}, "
        f"{counted(plan.num_stages, 'stage')}, {counted(plan.num_microbatches, 'micro-batch')}"
    )


def _search(arguments: argparse.Namespace) -> None:
    load = Load(
        forward=arguments.forward * arguments.microbatches,
        input_grad=arguments.input_grad * arguments.microbatches,
        weight_grad=arguments.weight_grad * arguments.microbatches,
        overhead=arguments.overhead,
        activation_bytes=arguments.activation_bytes,
        message_bytes=arguments.message_bytes,
        latency=arguments.latency,
        bandwidth=arguments.bandwidth,
    )
    found = search(
        arguments.ranks, [arguments.microbatches], load, arguments.memory_bytes,
        arguments.max_chunks,
    )  # fmt: skip
    print(f"{'schedule':26} {'chunks':>6} {'makespan':>10} {'bubble':>7} {'peak':>5} {'bytes':>10}")
    for simulation in found:
        plan = simulation.plan
        print(
            f"{plan.name:26} {plan.num_chunks:6} {simulation.makespan:10.4g} "
            f"{simulation.bubble:7.1%} {max(simulation.peak_activations):5} "
            f"{max(simulation.peak_bytes):10.3g}"
        )


if __name__ == "__main__":
    sys.exit(main())
