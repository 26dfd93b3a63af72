"""The example prints one hash, replicated on 2 ranks and sharded on 3."""

from __future__ import annotations

import runpy
import sys

import pytest

from tests.examples.runs import EXAMPLES
from tests.support.ranks import run_ranks


def _run(rank, size, *arguments):
    sys.argv = ["same_bits.py", "--steps", "4", *arguments]
    runpy.run_path(str(EXAMPLES / "same_bits.py"), run_name="__main__")


@pytest.mark.ranks
def test_two_replicas_and_three_shards_write_the_same_hash(tmp_path):
    files = [tmp_path / "replicated", tmp_path / "sharded"]
    run_ranks(_run, 2, "--hash-file", str(files[0]), timeout_s=240)
    run_ranks(_run, 3, "--shard", "--hash-file", str(files[1]), timeout_s=240)
    first, second = (file.read_text() for file in files)
    assert first == second
    assert len(first.strip()) == 64
