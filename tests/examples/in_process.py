"""Run train_gpt.py in this process, which starts in no time."""

from __future__ import annotations

import contextlib
import io
import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))  # in ranks there is no conftest

import torch
import train_gpt

import echelon.dist as dist
from tests.examples.runs import SMALL_MODEL


def train(*arguments: object) -> tuple[int, str]:
    """Run train_gpt in this process; return its exit code and what it wrote."""
    torch.set_num_threads(1)  # the fork server has loaded torch before OMP_NUM_THREADS was set
    sys.argv = ["train_gpt.py", *SMALL_MODEL, "--layers=1", *map(str, arguments)]
    written, code = io.StringIO(), 0
    with (
        contextlib.redirect_stdout(written),
        contextlib.redirect_stderr(written),
        warnings.catch_warnings(record=True) as caught,
    ):
        written.reconfigure = lambda **_: None
        try:
            train_gpt.main()
        except SystemExit as ended:
            code = ended.code
        finally:
            dist.shutdown()
    lines = [f"warning: {one.message}" for one in caught if one.category is RuntimeWarning]
    return code, "\n".join([*lines, written.getvalue().strip()])
