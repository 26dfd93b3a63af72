"""Every operation is in the black box: group, number, signature, state, and the user's line."""

from __future__ import annotations

import importlib
import inspect
import os
import signal
from pathlib import Path

import numpy as np
import pytest

import echelon.dist as dist
from echelon.errors import CollectiveError
from echelon.recorder.format.schema import Flag, State
from echelon.recorder.read import read_ring
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.ranks


def _line() -> int:
    frame = inspect.currentframe()
    assert frame is not None
    assert frame.f_back is not None
    return frame.f_back.f_lineno


def _work(rank: int, world_size: int, folder: str) -> list[int]:
    os.environ["ECHELON_RANK_DIR"] = f"{folder}/rank_{rank}"
    importlib.import_module("echelon.recorder.current")._opened = False  # the server's, not ours
    world = dist.init(timeout_s=30)
    lines = []
    world.all_reduce(np.ones((2, 3), np.float32), "max")
    lines.append(_line() - 1)
    world.broadcast(np.ones(4, np.int64), 1)
    lines.append(_line() - 1)
    pair = dist.new_group([1, 0], name="pair")
    work = pair.all_gather(np.empty(4), np.ones(2), async_op=True)
    lines.append(_line() - 1)
    work.wait()
    world.barrier()
    lines.append(_line() - 1)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(CollectiveError):
        world.all_reduce(np.ones(5))
    lines.append(_line() - 1)
    dist.shutdown()
    return lines


def test_operations_are_recorded_with_the_users_line(tmp_path):
    (lines, _) = run_ranks(_work, 2, str(tmp_path), exit_codes={1: -signal.SIGKILL})
    for rank in (0, 1):
        record = read_ring(Path(tmp_path, f"rank_{rank}", "ring"))
        rows = record.operations
        kinds = [record.strings[row["operation"]] for row in rows]
        assert kinds[:4] == ["all_reduce", "broadcast", "all_gather", "barrier"]
        groups = [record.groups[row["group"]] for row in rows]
        assert [group.name for group in groups[:4]] == ["world", "world", "pair", "world"]
        assert groups[2].ranks == (1, 0)
        assert [int(row["sequence"]) for row in rows[:4]] == [0, 1, 0, 2]
        signatures = [str(record.signatures[row["signature"]]) for row in rows]
        assert signatures[:3] == ["float32[2, 3]", "int64[4]", "float64[2]"]
        assert record.strings[rows[0]["reduce_op"]] == "max"
        assert int(rows[1]["root"]) == 1
        assert rows[2]["flags"] & Flag.ASYNC
        assert {State(row["state"]) for row in rows[:4]} == {State.COMPLETED}
        for row, line in zip(rows[:4], lines, strict=False):
            assert record.strings[row["site"]] == f"{__file__}:{line} _work"
            created, started, ended = (
                int(row[f"{name}_mono_ns"]) for name in ("created", "started", "completed")
            )
            assert 0 < created <= started <= ended
    record = read_ring(Path(tmp_path, "rank_0", "ring"))
    last = record.operations[-1]
    assert State(last["state"]) == State.FAILED
    assert "PeerLostError" in record.strings[last["error"]]
    assert record.strings[last["site"]].endswith(f":{lines[-1]} _work")
