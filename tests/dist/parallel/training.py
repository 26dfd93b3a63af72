"""Train a small model in one process, or on ranks in any layout, and return what came out."""

from __future__ import annotations

from typing import Any

import torch

import echelon.dist as dist
from echelon.dist.checkpoint import load, save
from echelon.dist.mesh import DeviceMesh
from echelon.dist.parallel import parallelize
from tests.dist.parallel.models import VOCABULARY, loss_of, make_batch, make_model

LEARNING_RATE, MAX_NORM = 1e-2, 0.5


def train_alone(
    shape: str, steps: int, vocabulary: int = VOCABULARY
) -> tuple[list[float], list[float]]:
    """Return losses and gradient norms of one process."""
    model = make_model(shape, vocabulary)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    losses, norms = [], []
    for step in range(steps):
        inputs, targets = make_batch(step, vocabulary=vocabulary)
        loss = loss_of(model(inputs), targets)
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, norms


def train(
    rank: int,
    world_size: int,
    layout: dict[str, int],
    shape: str,
    steps: range,
    options: dict[str, Any],
    folders: tuple[str, str] = ("", ""),
    vocabulary: int = VOCABULARY,
) -> tuple[list[float], list[float]]:
    """Train a model in a layout over some steps, from and to a checkpoint if folders are named."""
    world = dist.init(timeout_s=240.0)
    torch.set_num_threads(1)
    mesh = DeviceMesh(tuple(layout.values()), tuple(layout))
    model = make_model(shape, vocabulary)
    parallel = parallelize(model, mesh, loss_fn=loss_of, **options)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=LEARNING_RATE)
    state = {"model": parallel.model, "optimizer": optimizer}
    if folders[0]:
        load(folders[0], state)
    losses, norms = [], []
    part, count = parallel.data
    for step in steps:
        inputs, targets = make_batch(step, vocabulary=vocabulary)
        rows = slice(part * len(inputs) // count, (part + 1) * len(inputs) // count)
        term = parallel.step(inputs[rows], targets[rows])
        world.all_reduce(term)
        losses.append(float(term))
        norms.append(parallel.clip_grad_norm_(MAX_NORM))
        optimizer.step()
        optimizer.zero_grad()
    if folders[1]:
        save(folders[1], state)
    dist.shutdown()
    return losses, norms
