"""Time cold starts under torch.compile: per block, compiled only once, or the whole model."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time

from benchmarks.runner.place import ROOT
from benchmarks.sharding.model import SIZES, make_batch, make_model


def time_compilation(size: str) -> None:
    """Print the first and best step times in eager mode, with compiled blocks, and as a whole."""
    print("| compiled | first step s | best step s |\n|---|---|---|", flush=True)
    for what in ("nothing", "each block", "the whole"):
        call = f"compile.compile_and_step({size!r}, {what!r})"
        code = f"from benchmarks.sharding import compile; {call}"
        with tempfile.TemporaryDirectory() as cache:
            environ = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache, "OMP_NUM_THREADS": "1"}
            subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environ, check=True)


def compile_and_step(size: str, what: str) -> None:
    """Compile and take steps in this fresh process; print a row."""
    import torch
    from torch.nn import functional

    torch.set_num_threads(1)
    model = make_model(SIZES[size])
    if what == "each block":
        for block in model.blocks:
            block.compile()
    elif what == "the whole":
        model.compile()
    times = []
    for step in range(4):
        ids, targets = make_batch(SIZES[size], step, 0, 2)
        start = time.perf_counter()
        functional.cross_entropy(model(ids).flatten(0, 1), targets.flatten()).backward()
        times.append(time.perf_counter() - start)
    print(f"| {what} | {times[0]:.1f} | {min(times[1:]):.2f} |", flush=True)
