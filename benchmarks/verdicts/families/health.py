"""Families of jobs that are healthy, whatever they look like."""

from __future__ import annotations

from benchmarks.verdicts.engine import Host
from benchmarks.verdicts.families.scene import Scene, Truth

_HEALTHY = Truth(causes=("healthy",), culprits=((),))


def healthy_end(scene: Scene) -> Truth:
    """The job has finished."""
    scene.wants["moment"] = "end"
    return _HEALTHY


def healthy_in_flight(scene: Scene) -> Truth:
    """The job runs, and each rank is dumped at a different moment."""
    scene.wants["moment"] = "flight"
    return _HEALTHY


def healthy_active_only(scene: Scene) -> Truth:
    """As in flight, with dumps of active entries only."""
    scene.wants.update(moment="flight", only_active=True)
    return _HEALTHY


def healthy_wrapped(scene: Scene) -> Truth:
    """Rings so small that they have wrapped."""
    scene.wants.update(moment=scene.random.choice(("flight", "end")), ring=24)
    return _HEALTHY


def healthy_slow_rank(scene: Scene) -> Truth:
    """One rank's data is slow in every step: all wait for it, and the job moves."""
    slow = scene.rank()
    for step in scene.programs[slow]:
        step.insert(0, Host(6 * scene.shape.kernel_s))
    scene.wants["moment"] = "flight"
    return _HEALTHY


def healthy_after_stall(scene: Scene) -> Truth:
    """A rank was stuck for half a minute some steps ago, and all have continued."""
    scene.programs[scene.rank()][1].insert(0, Host(30.0))
    scene.wants["moment"] = scene.random.choice(("late_flight", "end"))
    return _HEALTHY
