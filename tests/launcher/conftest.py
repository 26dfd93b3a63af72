"""Fixtures of the launcher's tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.launcher.cluster import Cluster


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Callable[..., Cluster]]:
    """`cluster(script, *args)`: the nodes of one job, none of which is alive at the end."""
    made: list[Cluster] = []

    def make(script: str | Path, *args: str) -> Cluster:
        made.append(Cluster(tmp_path, script, *args))
        return made[-1]

    yield make
    for one in made:
        one.close()
    assert [one.left() for one in made] == [[] for _ in made]
