"""Measuring links and processors on ranks of one machine."""

from __future__ import annotations

import json

import pytest

from echelon.planner import measure
from echelon.planner.machine import assumed, read_machine
from tests.support.ranks import run_ranks


def _measured(rank, world_size):
    from echelon import dist

    measure._LARGE_NUMBERS, measure._SMALL_CALLS, measure._LARGE_CALLS = 1 << 12, 5, 3
    measure._MEMORY_NUMBERS, measure._WIDTH = 1 << 12, 32
    world = dist.init()
    found = measure.measure(world)
    dist.shutdown()
    return found


@pytest.mark.ranks
def test_all_ranks_get_the_figures_that_the_planner_reads(tmp_path):
    # As two nodes of two ranks: groups inside a node and across.
    found = run_ranks(_measured, 4, environ={"LOCAL_WORLD_SIZE": "2"})
    assert all(one == found[0] for one in found)
    path = tmp_path / "links.json"
    path.write_text(json.dumps(found[0]))
    machine = read_machine(path, assumed(is_half=False))
    assert [(link.size, link.is_across) for link in machine.links] == [(2, False), (2, True)]
    assert 0 <= machine.overlap.low <= machine.overlap.high <= 1
    assert machine.flops_per_s.low > 1e6
