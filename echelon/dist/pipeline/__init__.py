"""Pipeline parallelism: schedules as data, a simulator, and one executor for all of them.

Plans and their simulation need no torch; `Pipeline`, `Stage` and `split` load it when first used.
"""

from echelon.dist.pipeline.action import Action
from echelon.dist.pipeline.catalogue import schedule
from echelon.dist.pipeline.costs import Costs
from echelon.dist.pipeline.plan import Plan, PlanError
from echelon.dist.pipeline.simulator import simulate

__all__ = [
    "schedule", "simulate", "Action", "Costs", "Plan", "PlanError"
]  # fmt: skip
