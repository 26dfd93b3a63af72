"""DeviceMesh: groups along the axes of a grid of ranks."""

import numpy as np
import pytest

import echelon.dist as dist
from echelon.dist.mesh import DeviceMesh
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.ranks


def _grid(rank, world_size):
    dist.init()
    mesh = DeviceMesh((2, 2), ("pp", "dp"))
    total = np.array([rank + 1.0])
    mesh.group("dp").all_reduce(total)
    part, row = mesh["dp", "pp"], mesh["dp"]
    assert isinstance(row, DeviceMesh)
    assert row.group() is row.group("dp") is row.get_group() is mesh.get_group("dp")
    assert row["dp"].group() is row.group()
    dist.shutdown()
    return {
        "place": mesh.coordinate,
        "dp": mesh.group("dp").ranks,
        "pp": mesh.group("pp").ranks,
        "name": mesh.group("dp").name,
        "sum": float(total[0]),
        "part": (part.names, part.shape, part.coordinate, part.group("pp").ranks),
        "row": (row.names, row.shape, row.coordinate, row.size),
    }


def test_a_mesh_has_a_group_along_each_axis_and_sub_meshes():
    results = run_ranks(_grid, 4)
    assert [one["place"] for one in results] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert [one["dp"] for one in results] == [(0, 1), (0, 1), (2, 3), (2, 3)]
    assert [one["pp"] for one in results] == [(0, 2), (1, 3), (0, 2), (1, 3)]
    assert {one["name"] for one in results} == {"dp"}
    assert [one["sum"] for one in results] == [3.0, 3.0, 7.0, 7.0]
    assert results[1]["part"] == (("dp", "pp"), (2, 2), (1, 0), (1, 3))
    assert results[1]["row"] == (("dp",), (2,), (1,), 2)


def _split_rows(rank, world_size):
    """Rows have one name, and each splits on its own."""
    dist.init()
    row = DeviceMesh((2, 2), ("pp", "dp")).group("dp")
    parts = [row.split(0, name="part").ranks for _ in range(4)]
    dist.shutdown()
    return parts


def test_rows_of_one_name_split_apart():
    results = run_ranks(_split_rows, 4)
    assert results == [[(0, 1)] * 4, [(0, 1)] * 4, [(2, 3)] * 4, [(2, 3)] * 4]


@pytest.mark.parametrize(
    ("shape", "names", "says"),
    [
        ((2,), ("dp",), "needs 2 ranks, but the world has 1"),
        ((1, 1), ("dp",), "one name per axis"),
        ((1, 1), ("dp", "dp"), "is listed twice"),
        ((), (), "one name per axis"),
    ],
)
def test_a_mesh_that_does_not_fit_says_so(shape, names, says):
    dist.init()
    try:
        with pytest.raises(ValueError, match=says):
            DeviceMesh(shape, names)
        with pytest.raises(ValueError, match="its axes are dp"):
            DeviceMesh((1,), ("dp",))["tp"]
        mesh = DeviceMesh((1, 1), ("pp", "dp"))
        with pytest.raises(ValueError, match="its axes are pp, dp"):
            mesh.group("tp")
        with pytest.raises(ValueError, match="name one of the axes pp, dp"):
            mesh.group()
        with pytest.raises(ValueError, match="axis 'dp' is listed twice"):
            mesh["dp", "dp"]
        with pytest.raises(ValueError, match="at least one axis"):
            mesh[()]
    finally:
        dist.shutdown()


def _complete(rank, world_size):
    dist.init()
    mesh = DeviceMesh((2,), ("dp",))
    whole = mesh.completed(("pp", "dp", "tp"))
    assert whole.group("dp") is mesh.group("dp")
    with pytest.raises(ValueError, match=r"axis 'dp' .* is missing from"):
        mesh.completed(("pp", "tp"))
    assert mesh.completed(("dp",)).shape == (2,)
    found = whole.shape, whole.coordinate, whole.group("pp").ranks, whole.size
    dist.shutdown()
    return found


def test_a_mesh_is_completed_by_axes_of_one_rank():
    assert run_ranks(_complete, 2) == [((1, 2, 1), (0, rank, 0), (rank,), 2) for rank in range(2)]
