"""Families of healthy jobs, some of which look faulty."""

from __future__ import annotations

from benchmarks.verdicts.engine import Host
from benchmarks.verdicts.families.scene import Scene, Truth

_HEALTHY = Truth(causes=("healthy",), culprits=((),))


def healthy_end(scene: Scene) -> Truth:
    """Dump a job that has finished."""
    scene.wants["moment"] = "end"
    return _HEALTHY


def healthy_in_flight(scene: Scene) -> Truth:
    """Dump each rank of a running job at a different moment."""
    scene.wants["moment"] = "flight"
    return _HEALTHY


def healthy_active_only(scene: Scene) -> Truth:
    """Dump only the active entries of each rank of a running job, at different moments."""
    scene.wants.update(moment="flight", only_active=True)
    return _HEALTHY


def healthy_wrapped(scene: Scene) -> Truth:
    """Dump a job whose rings are so small that they have wrapped around."""
    scene.wants.update(moment=scene.random.choice(("flight", "end")), ring=24)
    return _HEALTHY


def healthy_slow_rank(scene: Scene) -> Truth:
    """Make one rank's data slow in every step: all ranks wait for it, but the job progresses."""
    slow = scene.rank()
    for step in scene.programs[slow]:
        step.insert(0, Host(6 * scene.shape.kernel_s))
    scene.wants["moment"] = "flight"
    return _HEALTHY


def healthy_after_stall(scene: Scene) -> Truth:
    """Make a rank stall for half a minute some steps before the dump, after which all continue."""
    scene.programs[scene.rank()][1].insert(0, Host(30.0))
    scene.wants["moment"] = scene.random.choice(("late_flight", "end"))
    return _HEALTHY
