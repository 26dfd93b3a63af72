"""Compute how the cost of a forward pass is distributed across a layout's stages."""

from __future__ import annotations

from echelon.planner.layout import Layout
from echelon.planner.model import Model
from echelon.planner.pipeline import stages_of


def forward_costs(model: Model, layout: Layout, context: int) -> tuple[float, ...]:
    """Return the cost of each stage's forward pass, as a fraction of the whole model's cost."""
    stages = stages_of(layout, model)
    block, head = model.block_flops(context), model.head_flops()
    whole = model.layers * block + head
    costs = [blocks * block / whole for blocks in stages.blocks]
    costs[-1] += head / whole
    return tuple(round(cost, 12) for cost in costs)
