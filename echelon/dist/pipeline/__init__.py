"""Pipeline parallelism: schedules as data, a simulator, and one executor for all schedules.

Plans and simulations do not need torch, which is loaded when `Pipeline`, `Stage` or `split` is
first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from echelon.dist.pipeline.plan.action import Action
from echelon.dist.pipeline.plan.catalog import schedule
from echelon.dist.pipeline.plan.plan import Plan, PlanError
from echelon.dist.pipeline.simulation.costs import Costs
from echelon.dist.pipeline.simulation.simulator import simulate

if TYPE_CHECKING:
    from echelon.dist.pipeline.execute.partition import split
    from echelon.dist.pipeline.execute.run import Pipeline
    from echelon.dist.pipeline.execute.stage import Stage

__all__ = [
    "Pipeline", "Stage", "split", "schedule", "simulate", "Action", "Costs", "Plan", "PlanError"
]  # fmt: skip

_HOMES = {"Pipeline": "run", "Stage": "stage", "split": "partition"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.execute.{_HOMES[name]}"), name)
