"""The benchmark of cells: which trainings it has, that it resumes, and what its table says."""

from __future__ import annotations

import itertools
import json

import pytest

pytest.importorskip("torch")

from benchmarks.same_bits.cells.plan import ENGINES, REFERENCE, SIZES, cells
from benchmarks.same_bits.cells.run import main
from benchmarks.same_bits.cells.table import table

CONDITIONS = {"processor": "one", "peers": {}, "load_before": 1.0, "load_after": 2.5}


def _record(cell, **found):
    base = {"cell": cell.name, "steps": 200, "micro_batches": 9, "commit": "c"}
    return base | {"conditions": CONDITIONS} | found


def _same(cell, sha="a", on_the_way="b"):
    return _record(cell, sha256=sha, losses_and_norms_sha256=on_the_way)


def test_cells_cover_every_number_of_ranks_on_every_engine():
    every = cells()
    assert every[0] == REFERENCE
    assert len({cell.name for cell in every}) == len(every)
    for kind in ("replicated", "sharded", "HSDP", "pipeline x replicas", "pipeline x shards"):
        found = {(cell.num_ranks, cell.engine) for cell in every if cell.kind == kind}
        assert found == {(size, engine) for size in SIZES for engine in ENGINES}
    for cell in every:
        for part in cell.parts(200):
            depth = part.layout.depth if part.layout.num_stages else 1
            assert part.num_ranks % depth == 0
            assert part.num_ranks // depth <= 9  # each replica has a micro-batch


@pytest.mark.parametrize("engine", ENGINES)
def test_a_cell_with_changes_covers_all_steps_and_always_changes_the_number_of_ranks(engine):
    (cell,) = [one for one in cells() if one.engine == engine and not one.num_ranks]
    parts = cell.parts(200)
    assert len(parts) == 21
    assert [part.stop for part in parts] == [part.start for part in parts[1:]] + [200]
    assert parts[0].start == 0
    for one, following in itertools.pairwise(parts):
        assert one.start < one.stop
        assert one.num_ranks != following.num_ranks
    assert cell.parts(200) == parts


def test_the_table_shows_cells_that_differ_fail_or_were_not_run():
    every = {cell.name: cell for cell in cells()}
    records = [
        _same(REFERENCE),
        _same(every["replicated on 2, shm, C"]),
        _same(every["replicated on 3, shm, C"], sha="x"),
        _same(every["replicated on 4, shm, C"], on_the_way="x"),
        _record(every["replicated on 6, shm, C"], failed="rank 1: exit code 1"),
        _same(every["20 changes of size, gloo"]),
    ]
    found = table(records)
    rows = {row[0]: row[1:] for row in found.rows}
    assert rows["replicated, shm, C"] == [
        "same", "same", "**differs**", "**differs**", "**failed**", "not run", "-",
    ]  # fmt: skip
    assert rows["20 changes of size, gloo"] == ["-"] * 6 + ["same"]
    assert found.about["loads"] == [1.0, 2.5]
    elsewhere = {**CONDITIONS, "processor": "another"}
    moved = [_same(REFERENCE), _same(every["replicated on 2, shm, C"]) | {"conditions": elsewhere}]
    assert table(moved).rows[0][2] == "**differs**"


@pytest.mark.ranks
def test_a_cell_with_a_record_is_not_run_again(tmp_path):
    out = tmp_path / "cells.jsonl"
    arguments = ["--steps", "2", "--cells", REFERENCE.name, "--out", str(out)]
    assert main(arguments) == 0
    (line,) = out.read_text().splitlines()
    assert len(json.loads(line)["sha256"]) == 64
    assert main(arguments) == 0
    assert out.read_text().splitlines() == [line]
    failed = json.loads(line) | {"failed": "an earlier run"}
    del failed["sha256"]
    out.write_text(json.dumps(failed) + "\n")
    assert main([*arguments, "--table"]) == 1
    assert main(arguments) == 0
    assert len(out.read_text().splitlines()) == 2
