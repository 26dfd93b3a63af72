"""The analyzers to score: each takes folders of dumps and returns an `Answer` for each."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.verdicts.scores import Answer

_TIMEOUT_S = 120.0
_TORCH_CAUSES = {
    "COLLECTIVE_TYPE_MISMATCH": "op_mismatch",
    "SIZE_OR_SYNTAX_MISMATCH": "shape_mismatch",
    "COLLECTIVE_DTYPE_MISMATCH": "dtype_mismatch",
    "COLLECTIVE_STATE_MISMATCH": "device_stuck",
}
# Runs in a separate process: torch's analyzer unpickles, evaluates, and raises on many inputs.
_TORCH_PROGRAM = """
import json, logging, sys
logging.disable(logging.CRITICAL)
from torch.distributed.flight_recorder.components.builder import build_db
from torch.distributed.flight_recorder.components.config_manager import JobConfig
from torch.distributed.flight_recorder.components.loader import read_dir
for folder in sys.stdin.read().split():
    try:
        args = JobConfig().parse_args([folder, "--allow-incomplete-ranks"])
        details, version = read_dir(args)
        found = []
        for one in build_db(details, args, version).collectives:
            sides = (one.mismatch_collectives or {}).items()
            odd = {rank: other.type_of_mismatch.state.name for rank, other in sides}
            missing = sorted(one.missing_ranks or ())
            if odd or missing:
                found.append([sorted(odd.items()), missing])
        print(json.dumps(found[:1]))
    except (Exception, SystemExit) as err:
        print(json.dumps(type(err).__name__ + ": " + str(err)[:120].replace(chr(10), " ")))
    sys.stdout.flush()
"""

Analyzer = Callable[[list[Path]], list[Answer]]


def ask_echelon(folders: list[Path]) -> list[Answer]:
    """Run `fr-analyze` in this process; return its answers."""
    return [_ask_echelon(folder) for folder in folders]


def _ask_echelon(folder: Path) -> Answer:
    from echelon.analysis import analyze

    try:
        verdict = analyze(folder).verdict
    except Exception as err:  # noqa: BLE001 - an analyzer that fails is scored as such
        return Answer(failed=f"{type(err).__name__}: {err}")
    if verdict is None:
        return Answer()
    return Answer(
        cause=verdict.cause.value,
        culprits=verdict.culprit_ranks,
        confidence=verdict.confidence.value,
        text=verdict.summary,
    )


def ask_torch(folders: list[Path]) -> list[Answer]:
    """Run torch's own analyzer; its first mismatched collective counts as its answer."""
    with tempfile.TemporaryDirectory() as scratch, contextlib.ExitStack():
        copies = [_without_truth(folder, Path(scratch)) for folder in folders]
        environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
        try:
            ran = subprocess.run(
                [sys.executable, "-c", _TORCH_PROGRAM],
                input=" ".join(map(str, copies)),
                capture_output=True,
                text=True,
                timeout=_TIMEOUT_S + 5.0 * len(folders),
                env=environment,
                check=False,
            )
            lines = [line for line in ran.stdout.splitlines() if line[:1] in '["']
        except subprocess.TimeoutExpired as late:
            out = late.stdout or b""
            lines = io.TextIOWrapper(io.BytesIO(out)).read().splitlines()  # type: ignore[arg-type]
    lines += [json.dumps("no answer")] * (len(folders) - len(lines))
    return [_torch_answer(json.loads(line)) for line in lines[: len(folders)]]


def _without_truth(folder: Path, scratch: Path) -> Path:
    """Link only the dumps into a folder, because torch's reader treats every file as a dump."""
    copy = scratch / folder.name
    copy.mkdir()
    for file in folder.iterdir():
        if file.name != "truth.json":
            (copy / file.name).symlink_to(file.resolve())
    return copy


def _torch_answer(found: Any) -> Answer:
    if isinstance(found, str):
        return Answer(failed=found)
    if not found:
        return Answer()
    odd, missing = found[0]
    if odd:
        cause = _TORCH_CAUSES.get(odd[0][1], "unknown")
        return Answer(cause=cause, culprits=tuple(int(rank) for rank, _ in odd))
    return Answer(cause="host_hang", culprits=tuple(missing))


ANALYZERS: dict[str, Analyzer] = {"fr-analyze": ask_echelon, "torch": ask_torch}
