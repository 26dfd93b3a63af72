"""The recorded sets of torch's dumps with a part of them lost: a wrong rank is never named surely.

What is lost may take the proof along, so a verdict may become vague or wrong with `possible`; it
must not stay sure.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from echelon.analysis import analyze
from echelon.analysis.finding import Confidence, Finding

DATA = Path(__file__).parents[1] / "data" / "torch_dumps"
SETS = sorted(path.parent.relative_to(DATA).as_posix() for path in DATA.glob("*/*/truth.json"))
Dump = dict[str, Any]


def ring_of(length: int) -> Callable[[Dump], Dump]:
    return lambda dump: {**dump, "entries": dump["entries"][-length:]}


def without_frames(dump: Dump) -> Dump:
    entries = [{k: v for k, v in one.items() if k != "frames"} for one in dump["entries"]]
    return {**dump, "entries": entries}


def without_status(dump: Dump) -> Dump:
    return {key: value for key, value in dump.items() if key != "pg_status"}


CHANGES = {
    "a ring of 20": ring_of(20),
    "a ring of 5": ring_of(5),
    "no frames": without_frames,
    "no status": without_status,
}


def dumps_of(name: str) -> dict[int, Dump]:
    files = sorted(file for file in (DATA / name).iterdir() if file.name != "truth.json")
    return {int(file.name.rpartition("_")[2]): pickle.loads(file.read_bytes()) for file in files}


def verdict_of(dumps: dict[int, Dump], folder: Path) -> Finding | None:
    folder.mkdir()
    for rank, dump in dumps.items():
        (folder / f"host{rank // 2}-rank{rank}.bin").write_bytes(pickle.dumps(dump, protocol=2))
    return analyze(folder).verdict


def truth_of(name: str) -> set[int]:
    return set(json.loads((DATA / name / "truth.json").read_text())["culprit_ranks"])


def losses(ranks: list[int]) -> Iterator[set[int]]:
    yield from ({rank} for rank in ranks)
    if len(ranks) > 2:
        yield set(ranks[: len(ranks) // 2])
        yield set(ranks[::2])


@pytest.mark.parametrize("name", SETS)
def test_lost_dumps_never_make_a_wrong_name_sure(tmp_path: Path, name: str) -> None:
    dumps, truth = dumps_of(name), truth_of(name)
    for number, lost in enumerate(losses(sorted(dumps))):
        left = {rank: dump for rank, dump in dumps.items() if rank not in lost}
        verdict = verdict_of(left, tmp_path / str(number))
        if verdict is not None and verdict.confidence is not Confidence.POSSIBLE:
            assert truth.issuperset(verdict.culprit_ranks), (lost, verdict.summary)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", SETS)
def test_less_in_each_dump_names_the_same_ranks(tmp_path: Path, name: str, change: str) -> None:
    dumps = {rank: CHANGES[change](dump) for rank, dump in dumps_of(name).items()}
    verdict = verdict_of(dumps, tmp_path / "dumps")
    assert (set() if verdict is None else set(verdict.culprit_ranks)) == truth_of(name)
