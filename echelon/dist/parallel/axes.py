"""The process groups of a mesh, named after the purpose of each axis."""

from __future__ import annotations

from dataclasses import dataclass

from echelon.dist.group import ProcessGroup
from echelon.dist.mesh import DeviceMesh

NAMES = ("pp", "replicate", "shard", "tp")


@dataclass(frozen=True)
class Axes:
    """A mesh with the axis names that `parallelize` uses.

    Attributes:
        mesh: a mesh with the axes "pp", "replicate", "shard" and "tp"; an axis that the caller's
            mesh lacks has size 1.
        stages: this rank's group along axis "pp", whose ranks hold the stages of one pipeline.
        tensor: this rank's group along axis "tp", whose ranks hold the slices of the same layers.
    """

    mesh: DeviceMesh

    @property
    def stages(self) -> ProcessGroup:
        """This rank's group along axis "pp", whose ranks hold the stages of one pipeline."""
        return self.mesh.group("pp")

    @property
    def tensor(self) -> ProcessGroup:
        """This rank's group along axis "tp", whose ranks hold slices of the same layers."""
        return self.mesh.group("tp")

    @property
    def data(self) -> DeviceMesh:
        """This rank's sub-mesh (replicate, shard), across which each batch is split."""
        return self.mesh["replicate", "shard"]

    @property
    def data_place(self) -> tuple[int, int]:
        """This rank's data-parallel index and the data-parallel size, as (index, size)."""
        data = self.data
        return data.coordinate[0] * data.shape[1] + data.coordinate[1], data.size


def axes_of(mesh: DeviceMesh) -> Axes:
    """Return the axes of a mesh; missing axes get size 1. Collective if an axis is missing.

    Raises:
        ValueError: the argument is not a mesh, or its axes are unknown or in the wrong order.
        CollectiveTimeoutError: a rank did not join within the world's timeout.
    """
    if not isinstance(mesh, DeviceMesh):
        raise ValueError(f"mesh must be a DeviceMesh, got {type(mesh).__name__}")
    known = tuple(name for name in NAMES if name in mesh.names)
    if known != mesh.names:
        raise ValueError(
            f"the axes of a mesh for parallelize must be among {', '.join(NAMES)}, in this order; "
            f"got {', '.join(mesh.names)}"
        )
    return Axes(mesh.completed(NAMES))
