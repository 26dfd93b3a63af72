"""The time of a step: by hand, and its limits."""

from __future__ import annotations

import dataclasses
import random

import pytest

from echelon.dist.pipeline.plan.catalog import schedule
from echelon.planner.layout import Job, Layout
from echelon.planner.machine import Figure, Link, Machine
from echelon.planner.model import Model
from echelon.planner.step_time import step_time

MODEL = Model(layers=8, width=128, heads=8, vocabulary=1, context=64, learns_positions=False)
JOB = Job(ranks=4, ranks_per_node=2, batch=16, context=64)


def exactly(value):
    return Figure(value, value, value)


def machine(*, latency_s=0.0, bytes_per_s=1e30, overlap=0.0, across=1e30):
    return Machine(
        flops_per_s=exactly(1e9),
        bytes_per_s=exactly(1e30),
        overlap=exactly(overlap),
        block_s=exactly(0.0),
        links=(
            Link(2, False, exactly(latency_s), exactly(bytes_per_s)),
            Link(2, True, exactly(latency_s), exactly(across)),
        ),
    )


def test_one_rank_takes_its_operations():
    found = step_time(MODEL, Layout(), JOB, machine())
    assert found.total == pytest.approx(MODEL.train_flops(64) * 16 * 64 / 1e9)
    assert found.total == pytest.approx(found.compute)


@pytest.mark.parametrize("layout", [Layout(shard=4), Layout(replicate=4), Layout(tp=4)])
def test_without_communication_ranks_divide_the_time(layout):
    one = step_time(MODEL, Layout(), JOB, machine()).total
    assert step_time(MODEL, layout, JOB, machine()).total == pytest.approx(one / 4)


def test_recomputation_costs_a_third():
    plain = step_time(MODEL, Layout(), JOB, machine()).compute
    again = step_time(MODEL, Layout(recompute=True), JOB, machine()).compute
    assert again == pytest.approx(plain * 4 / 3)


@pytest.mark.parametrize("microbatches", [4, 8, 16])
def test_1f1b_idles_for_all_but_one_stage(microbatches):
    layout = Layout(pp=4, schedule="1f1b", microbatches=microbatches)
    found = step_time(MODEL, layout, JOB, machine())
    assert found.bubble == pytest.approx(found.compute * 3 / microbatches, rel=0.01)
    assert schedule("1f1b", 4, microbatches).num_ranks == 4


def test_replicas_exchange_twice_what_a_ring_carries():
    found = step_time(MODEL, Layout(replicate=2, shard=1), JOB, machine(bytes_per_s=1e6))
    blocks = MODEL.layers * MODEL.block_matrices + MODEL.vocabulary * MODEL.width
    untied_head = MODEL.vocabulary * MODEL.width
    assert found.exposed == pytest.approx(2 * 0.5 * 4 * (blocks + untied_head) / 1e6, rel=0.01)


def test_a_latency_counts_for_each_step_of_the_ring():
    found = step_time(MODEL, Layout(tp=2), JOB, machine(latency_s=1e-3))
    assert found.tensor == pytest.approx(2 * 1e-3 * 4 * 8)  # 2 steps x 4 calls x 8 blocks


def test_computation_hides_what_the_machine_can_hide_of_gathers():
    slow = machine(bytes_per_s=1e9)
    bare = step_time(MODEL, Layout(shard=2), JOB, slow)
    hidden = step_time(MODEL, Layout(shard=2), JOB, dataclasses.replace(slow, overlap=exactly(1.0)))
    half = step_time(MODEL, Layout(shard=2), JOB, dataclasses.replace(slow, overlap=exactly(0.5)))
    assert 0 < hidden.exposed < half.exposed < bare.exposed
    assert half.exposed == pytest.approx(bare.exposed / 2)


def test_groups_that_span_nodes_use_the_links_between_them():
    links = machine(bytes_per_s=1e9, across=1e6)
    inside = step_time(MODEL, Layout(replicate=2, shard=2), JOB, links)
    reversed_axes = step_time(MODEL, Layout(replicate=1, shard=4), JOB, links)
    assert reversed_axes.exposed > inside.exposed  # gathers across, thrice the bytes


def test_the_link_of_the_nearest_size_is_taken():
    links = tuple(Link(n, False, exactly(n), exactly(1.0)) for n in (2, 4, 16))
    found = dataclasses.replace(machine(), links=links)
    assert [found.link(n, is_across=False).size for n in (1, 2, 3, 5, 100)] == [2, 2, 4, 4, 16]
    assert found.link(2, is_across=True).size == 2  # nothing across was measured


def test_draws_lie_within_the_bounds_nine_times_in_ten():
    chance, figure = random.Random(0), Figure(10.0, 5.0, 40.0)
    draws = [figure.draw(chance) for _ in range(4000)]
    assert sum(5.0 <= draw <= 40.0 for draw in draws) / 4000 == pytest.approx(0.9, abs=0.02)
    assert sorted(draws)[2000] == pytest.approx(10.0, rel=0.05)
    assert {Figure(0.0, 0.0, 0.0).draw(chance), exactly(3.0).draw(chance)} == {0.0, 3.0}


@pytest.mark.parametrize("numbers", [(1, 2, 3), (2, 1, 1.5), (float("nan"), 0, 1), (1, -1, 2)])
def test_figures_without_order_are_refused(numbers):
    with pytest.raises(ValueError, match=r"expected three finite|in ascending order"):
        Figure(*numbers)
