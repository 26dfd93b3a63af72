"""Measure the cost of recording, compared with torch's flight recorder, and in a training step.

    python -m benchmarks.recorder [--rounds N] [--only NAME] [--markdown FILE]

Most costs are CPU time of the measured thread or process rather than wall time, so other work on
the machine disturbs them less. Everything ends within a minute. Cases:

    operation   one operation, recorded with its call site, called with 1, 3 and 10 frames on the
                stack: N rounds, in which the C core, the Python writer and torch's recorder take
                turns of a few milliseconds, in random order. torch's case is a Gloo all_reduce in
                a world of one, in two long-lived processes, one with its recorder and one
                without. Its cost is the difference of their fastest tenths, because other work
                can only add to a time; the median of the rounds' ratios is printed beside it
    all_reduce  two ranks, 4 bytes over shm, echelon's recorder on and off in turn: wall time, and
                the ratio of each pair of turns
    ring        a full ring of 4096 operations: read it, write its dump
    step        a training step of examples/train_gpt.py, echelon's recorder on and off in turn
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.runner.machine import Conditions
from benchmarks.runner.options import finish, parser
from benchmarks.runner.place import ROOT, child_environ
from benchmarks.runner.rounds import Case, Measure, fastest_tenth, measure, spread

os.environ.setdefault("OMP_NUM_THREADS", "1")

import echelon.recorder.current as black_box
from echelon.recorder import span, step
from echelon.recorder.read import read_ring
from echelon.recorder.read.dump import write_dump
from echelon.recorder.write.recorder import Recorder

EXAMPLES = ROOT / "examples"
NUM_CALLS = 1000  # of a turn: some milliseconds
NUM_TORCH_CALLS = 1000
NUM_SLOTS = 4096
SHAPES = ((1024, 1024),)
STEPS_A_RUN = 2
NUM_ALL_REDUCES = 250
MIN_ROUNDS = 5
OPERATIONS_S = 20.0  # no further round after this time, on a busy machine
STEPS_S = 15.0
COLUMNS = tuple((title, "left") for title in ("what", "measured", "target", "met"))
STACKS = (1, 3, 10)  # frames of the user's
TARGETS_US = {"C": 0.6, "Python": 2.5}
TARGET_RING_MS = 20.0
TARGET_STEP_SHARE = 0.01
TARGET_ALL_REDUCE_SHARE = 0.15

# One of two long-lived processes: it makes a turn's calls for each input line, with that many
# frames.
TORCH = """
import sys, time
import torch, torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
x = torch.zeros(1)
def rounds(count):
    for _ in range(count):
        dist.all_reduce(x)
def call(left, count):
    if left > 1:
        call(left - 1, count)
    else:
        rounds(count)
rounds(2000)
from torch._C._distributed_c10d import _dump_fr_trace
import pickle
print(len(pickle.loads(_dump_fr_trace()).get("entries", [])), flush=True)
while True:
    line = sys.stdin.readline()
    if not line:
        break
    frames = int(line)
    # The script and `rounds` are two of the frames.
    began = time.process_time()
    rounds({count}) if frames < 3 else call(frames - 2, {count})
    print((time.process_time() - began) / {count} * 1e6, flush=True)
"""


class Torch:
    """A process that calls torch's all_reduce, with a flight recorder of `size` entries."""

    def __init__(self, size: int) -> None:
        env = {**os.environ, "TORCH_CPP_LOG_LEVEL": "ERROR"}
        env["TORCH_FR_BUFFER_SIZE"] = env["TORCH_NCCL_TRACE_BUFFER_SIZE"] = str(size)
        self._size = size
        self._job = subprocess.Popen(
            [sys.executable, "-c", TORCH.format(count=NUM_TORCH_CALLS)],
            env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def is_ready(self) -> bool:
        """Wait until the process is ready; return False if torch is not installed."""
        entries = self._answer()
        if entries is None:
            return False
        assert (entries > 0) == (self._size > 0), "torch's recorder did not obey"
        return True

    def cost_us(self, frames: int) -> float:
        """Return the CPU time of one call, in microseconds, with `frames` on the stack."""
        assert self._job.stdin is not None
        self._job.stdin.write(f"{frames}\n")
        self._job.stdin.flush()
        cost = self._answer()
        assert cost is not None, "torch's process ended"
        return cost

    def _answer(self) -> float | None:
        assert self._job.stdout is not None
        line = self._job.stdout.readline()
        return float(line) if line else None

    def close(self) -> None:
        """Close the process's input and wait for it to exit."""
        self._job.communicate(timeout=30)


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    what: str
    value: str
    target: str = ""
    met: str = ""
    samples: Mapping[str, Sequence[float]] = field(default_factory=dict)


@contextlib.contextmanager
def recording() -> Iterator[Recorder]:
    """Record into a ring in a temporary folder."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["ECHELON_RANK_DIR"] = str(Path(folder) / "rank")
        recorder = black_box.current()
        assert recorder is not None, "no ring could be made"
        yield recorder


def cost_us(one: Callable[[int], None], rounds: int) -> tuple[float, float]:
    """Return a call's (smallest, median) CPU time; `one(n)` makes `n` calls."""
    results = []
    for _ in range(rounds):
        began = time.thread_time()
        one(NUM_CALLS)
        results.append((time.thread_time() - began) / NUM_CALLS * 1e6)
    return min(results), statistics.median(results)


def complete_many(recorder: Recorder, group: int, count: int) -> None:
    """Begin and complete `count` operations directly in a user frame."""
    for _ in range(count):
        recorder.completed(
            recorder.begin(
                group, "all_reduce", sequence=7, dtype="float32", shapes=SHAPES,
                num_bytes=4 << 20, reduce_op="sum", timeout_s=600.0,
            )
        )  # fmt: skip


def start_many(recorder: Recorder, group: int, count: int) -> None:
    """Begin, start and complete `count` operations, as for asynchronous operations."""
    for _ in range(count):
        number = recorder.begin(
            group, "all_reduce", sequence=7, dtype="float32", shapes=SHAPES,
            num_bytes=4 << 20, reduce_op="sum", timeout_s=600.0,
        )  # fmt: skip
        recorder.started(number)
        recorder.completed(number)


def on_stack(frames: int, work: Callable[[], None]) -> float:
    """Return the CPU time of `work` in seconds, on a thread with `frames` user frames.

    The thread's outermost frames belong to the standard library.
    """
    seconds = 0.0

    def call(left: int) -> None:
        nonlocal seconds
        if left > 1:
            call(left - 1)
            return
        began = time.thread_time()
        work()
        seconds = time.thread_time() - began

    thread = threading.Thread(target=call, args=(frames - 1,))  # `work` makes the last frame
    thread.start()
    thread.join()
    return seconds


Costs = dict[tuple[str, int], list[float]]  # (writer, frames) -> one per round


def stack_costs(recorder: Recorder, rounds: int, order: int | None) -> Costs:
    """Measure an operation under all recorders, in turn, on stacks of several depths."""
    writers = {"Python": Recorder(recorder._ring, in_c=False)}
    if recorder.is_in_c:
        writers["C"] = recorder

    def measure_ours(name: str, frames: int, _: int) -> float:
        writer = writers[name]
        work = functools.partial(complete_many, writer, writer.group("world", range(8)), NUM_CALLS)
        return on_stack(frames, work) / NUM_CALLS * 1e6

    both = {"torch on": Torch(NUM_SLOTS), "torch off": Torch(0)}
    try:
        are_ready = [one.is_ready() for one in both.values()]  # both start at the same time
        has_torch = all(are_ready)
        cases = []
        for frames in STACKS:
            sides: dict[str, Measure] = {
                name: functools.partial(measure_ours, name, frames) for name in writers
            }
            for name, one in both.items() if has_torch else ():
                sides[name] = functools.partial(_torch_us, one, frames)
            cases.append(Case(name=str(frames), sides=sides))
        found = measure(cases, rounds, seed=order, limit_s=OPERATIONS_S, least_rounds=MIN_ROUNDS)
    finally:
        for one in both.values():
            one.close()
    return {
        (side, int(frames)): values
        for frames, samples in found.items()
        for side, values in samples.items()
    }


def _torch_us(process: Torch, frames: int, _: int) -> float:
    return process.cost_us(frames)


def operation_costs(recorder: Recorder, rounds: int) -> dict[str, tuple[float, float]]:
    """Measure the recorder's other calls; the costs include the loop."""
    group = recorder.group("world", range(8))

    def spans(count: int) -> None:
        for _ in range(count):
            with span("compute"):
                pass

    def steps(count: int) -> None:
        for _ in range(count):
            step()

    return {
        "begin + start + complete": cost_us(functools.partial(start_many, recorder, group), rounds),
        "span": cost_us(spans, rounds),
        "step": cost_us(steps, rounds),
    }


def all_reduce_costs_us(rounds: int) -> dict[bool, list[float]]:
    """Return each turn's median time of a 4-byte all_reduce, with recording on and off."""
    done = subprocess.run(
        [
            sys.executable, "-m", "echelon", "run", "--nproc-per-node", "2",
            "--run-dir", tempfile.mkdtemp(), __file__, "--rank", "--rounds", str(rounds),
        ],
        capture_output=True, text=True, check=True,
        env={name: text for name, text in child_environ().items() if name != "ECHELON_RANK_DIR"},
    )  # fmt: skip
    line = next(line for line in done.stdout.splitlines() if '"off"' in line)
    found = json.loads(line[line.index("{") :])
    return {True: found["on"], False: found["off"]}


def be_a_rank(rounds: int) -> None:
    """Run as one of the two ranks; rank 0 prints the times of its calls, in microseconds."""
    import numpy as np

    import echelon.dist as dist

    world = dist.init()
    x = np.ones(1, np.float32)
    recorder = black_box.current()
    assert recorder is not None
    medians: dict[bool, list[float]] = {True: [], False: []}
    for run in range(2 * rounds + 2):
        is_on = run % 2 == 0
        black_box._recorder = recorder if is_on else None
        for _ in range(50):
            world.all_reduce(x)
        times = []
        for _ in range(NUM_ALL_REDUCES):
            began = time.perf_counter_ns()
            world.all_reduce(x)
            times.append((time.perf_counter_ns() - began) / 1e3)
        if run > 1:
            medians[is_on].append(statistics.median(times))
    black_box._recorder = recorder
    if world.rank == 0:
        print(json.dumps({"on": medians[True], "off": medians[False]}), flush=True)
    dist.shutdown()


def all_reduce_rows(_: Recorder, rounds: int) -> Iterator[Row]:
    """Measure what recording adds to a small collective."""
    found = all_reduce_costs_us(10 * rounds)
    ratios = [on / off - 1 for on, off in zip(found[True], found[False], strict=True)]
    low, share, high = statistics.quantiles(ratios, n=4)
    yield Row(
        "all_reduce of 4 bytes, 2 ranks",
        f"{share:+.1%} ({low:+.1%} to {high:+.1%}) over {len(ratios)} pairs of turns; "
        f"{statistics.median(found[True]):.2f} us recorded, "
        f"{statistics.median(found[False]):.2f} us not",
        f"{TARGET_ALL_REDUCE_SHARE:.0%}",
        "yes" if share <= TARGET_ALL_REDUCE_SHARE else "no",
        {"us recorded": found[True], "us not": found[False]},
    )


def ring_costs_ms(recorder: Recorder, rounds: int) -> tuple[float, float, int]:
    """Return the median times of reading a full ring and writing its dump, and the dump's size."""
    group = recorder.group("world", range(8))
    for i in range(NUM_SLOTS + 1):
        shapes = ((i % 97, 64),)
        number = recorder.begin(group, "all_reduce", sequence=i, dtype="float32", shapes=shapes)
        recorder.started(number)
        recorder.completed(number)
    path = Path(os.environ["ECHELON_RANK_DIR"]) / "ring"
    reads, writes = [], []
    for _ in range(rounds):
        began = time.process_time()
        record = read_ring(path)
        read_by = time.process_time()
        write_dump(record, path.with_name("dump"))
        reads.append((read_by - began) * 1e3)
        writes.append((time.process_time() - read_by) * 1e3)
    assert len(record.operations) == NUM_SLOTS
    size = path.with_name("dump").stat().st_size
    return statistics.median(reads), statistics.median(writes), size


def step_costs_ms(recorder: Recorder, rounds: int) -> dict[str, Any]:
    """Train with the recorder on and off in turn; return the CPU time per step."""
    sys.path.insert(0, str(EXAMPLES))
    from gpt.model.transformer import GPTConfig
    from gpt.text.corpus import load_corpus
    from gpt.training.loop import Trainer, TrainingSettings

    import echelon.dist as dist

    settings = TrainingSettings(steps=10_000, batch=16, lr=3e-3, warmup=50, clip=1.0, seed=0)
    config = GPTConfig(layers=4, width=128, heads=4, context=128)
    world = dist.init()
    trainer = Trainer.build(config, settings, load_corpus(), world=world)
    times: dict[bool, list[float]] = {True: [], False: []}
    trainer.train_step()
    before = recorder.num_records()
    trainer.train_step()
    records = recorder.num_records() - before
    until_s = time.monotonic() + STEPS_S
    for run in range(2 * rounds):
        is_on = run % 2 == 0
        if is_on and run >= 2 * MIN_ROUNDS and time.monotonic() > until_s:
            break
        black_box._recorder = recorder if is_on else None
        began = time.process_time()
        for _ in range(STEPS_A_RUN):
            trainer.train_step()
        times[is_on].append((time.process_time() - began) / STEPS_A_RUN * 1e3)
    black_box._recorder = recorder
    dist.shutdown()
    return {"on": times[True], "off": times[False], "records": records}


def torch_row(found: Costs, frames: int) -> Row:
    """Return the row that compares torch's all_reduce with and without its recorder."""
    on, off = found["torch on", frames], found["torch off", frames]
    ratios = [a / b for a, b in zip(on, off, strict=True)]
    return Row(
        f"torch's recorder, {frames} frames",
        f"{fastest_tenth(on) - fastest_tenth(off):.2f} us at the fastest tenth (all_reduce "
        f"{fastest_tenth(on):.2f} us with it, {fastest_tenth(off):.2f} us without); "
        f"median ratio of a round {spread(ratios)}",
        samples={"us with it": on, "us without": off},
    )


def operation_rows(recorder: Recorder, rounds: int, order: int | None) -> Iterator[Row]:
    """Measure the recorder's calls and, for comparison, torch's recorder."""
    found = stack_costs(recorder, 3 * rounds, order)
    for frames in STACKS:
        if ("torch on", frames) in found:
            yield torch_row(found, frames)
        for writer, target in TARGETS_US.items():
            costs = found.get((writer, frames))
            if costs:
                median = statistics.median(costs)
                yield Row(
                    f"begin + completed in {writer}, {frames} frames",
                    f"{fastest_tenth(costs):.2f} us at the fastest tenth, {spread(costs)} us",
                    f"{target:g} us",
                    "yes" if median <= target else "no",
                    {"us": costs},
                )
    for name, (best, median) in operation_costs(recorder, 3 * rounds).items():
        yield Row(name, f"{best:.2f} us best, {median:.2f} us median")


def ring_rows(recorder: Recorder, rounds: int) -> Iterator[Row]:
    """Measure a full ring."""
    read_ms, write_ms, size = ring_costs_ms(recorder, max(5, rounds))
    total = read_ms + write_ms
    yield Row(
        f"full ring of {NUM_SLOTS} to a dump",
        f"{total:.1f} ms (read {read_ms:.1f}, write {write_ms:.1f}; {size / 1e3:.0f} kB)",
        f"{TARGET_RING_MS:g} ms",
        "yes" if total <= TARGET_RING_MS else "no",
    )


def step_rows(recorder: Recorder, rounds: int) -> Iterator[Row]:
    """Measure a training step."""
    cost_us_each = operation_costs(recorder, 5)["begin + start + complete"][0]
    found = step_costs_ms(recorder, rounds)
    share = found["records"] * cost_us_each / 1e3 / statistics.median(found["off"])
    yield Row(
        "records x cost / step",
        f"{share:.4%} ({found['records']} records of {cost_us_each:.2f} us)",
        f"{TARGET_STEP_SHARE:.0%}",
        "yes" if share <= TARGET_STEP_SHARE else "no",
    )
    on, off = statistics.median(found["on"]), statistics.median(found["off"])
    for name in ("on", "off"):
        value = f"{spread(found[name])} ms, {len(found[name])} runs"
        yield Row(f"step, recorder {name}", value, samples={"ms": found[name]})
    yield Row("difference of the medians", f"{(on - off) / off:+.2%}")


def main() -> None:
    """Run the cases and print the table."""
    arguments = parser(__doc__, rounds=20)
    arguments.add_argument("--only", choices=("operation", "all_reduce", "ring", "step"))
    arguments.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = arguments.parse_args()
    if options.rank:
        be_a_rank(options.rounds)
        return
    cases: dict[str, Callable[[Recorder, int], Iterator[Row]]] = {
        "operation": functools.partial(operation_rows, order=options.seed),
        "all_reduce": all_reduce_rows,
        "ring": ring_rows,
        "step": step_rows,
    }
    conditions = Conditions(("torch", "numpy"))
    rows: list[Row] = []
    with recording() as recorder:
        for name, case in cases.items():
            if options.only in (None, name):
                for row in case(recorder, options.rounds):
                    rows.append(row)
                    print(f"{row.what}: {row.value}", file=sys.stderr, flush=True)
    cells = [[row.what, row.value, row.target, row.met] for row in rows]
    finish(options, conditions, COLUMNS, cells, {row.what: row.samples for row in rows})


if __name__ == "__main__":
    main()
