"""DeviceMesh: groups along the axes of a grid of ranks."""

import numpy as np
import pytest

import echelon.dist as dist
from echelon.dist.mesh import DeviceMesh
from tests.ranks import run_ranks

pytestmark = pytest.mark.ranks


def _grid(rank, world_size):
    dist.init()
    mesh = DeviceMesh((2, 2), ("pp", "dp"))
    total = np.array([rank + 1.0])
    mesh["dp"].all_reduce(total)
    part = mesh["dp", "pp"]
    dist.shutdown()
    return {
        "place": mesh.coordinate,
        "dp": mesh["dp"].ranks,
        "pp": mesh["pp"].ranks,
        "name": mesh["dp"].name,
        "sum": float(total[0]),
        "part": (part.names, part.shape, part.coordinate, part["pp"].ranks),
    }


def test_a_grid_of_ranks_has_a_group_along_each_axis():
    results = run_ranks(_grid, 4)
    assert [one["place"] for one in results] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert [one["dp"] for one in results] == [(0, 1), (0, 1), (2, 3), (2, 3)]
    assert [one["pp"] for one in results] == [(0, 2), (1, 3), (0, 2), (1, 3)]
    assert {one["name"] for one in results} == {"dp"}
    assert [one["sum"] for one in results] == [3.0, 3.0, 7.0, 7.0]
    assert results[1]["part"] == (("dp", "pp"), (2, 2), (1, 0), (1, 3))


def _split_rows(rank, world_size):
    """Rows have one name, and each splits on its own."""
    dist.init()
    row = DeviceMesh((2, 2), ("pp", "dp"))["dp"]
    parts = [row.split(0, name="part").ranks for _ in range(4)]
    dist.shutdown()
    return parts


def test_rows_of_one_name_split_apart():
    results = run_ranks(_split_rows, 4)
    assert results == [[(0, 1)] * 4, [(0, 1)] * 4, [(2, 3)] * 4, [(2, 3)] * 4]


@pytest.mark.parametrize(
    ("shape", "names", "says"),
    [
        ((2,), ("dp",), "the world has 1 ranks"),
        ((1, 1), ("dp",), "a name for each axis"),
        ((1, 1), ("dp", "dp"), "comes twice"),
        ((), (), "a name for each axis"),
    ],
)
def test_a_mesh_that_does_not_fit_says_so(shape, names, says):
    dist.init()
    try:
        with pytest.raises(ValueError, match=says):
            DeviceMesh(shape, names)
        with pytest.raises(ValueError, match="its axes: dp"):
            DeviceMesh((1,), ("dp",))["tp"]
    finally:
        dist.shutdown()
