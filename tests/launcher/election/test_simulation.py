"""Never two worlds, and a majority always continues: over random losses, cuts and delays."""

from __future__ import annotations

import pytest

from tests.launcher.election.simulation import PROMISE_S, Simulation


@pytest.mark.parametrize("count", [3, 4, 5])
@pytest.mark.parametrize("how", ["crash", "cut"])
def test_the_loss_of_the_host_is_survived(count, how):
    job = Simulation(count, count)
    job.run(3)
    assert job.running() == {(0, 0)}
    if how == "crash":
        job.nodes["n0"].crash()
    else:
        job.net.island["n0"] = 1
    job.run(2 * PROMISE_S + 4)
    assert not job.history.overlaps
    (world,) = job.running()
    assert world[0] >= 1, "a later term"
    assert [n.world for n in job.nodes.values()].count(world) == count - 1
    assert job.nodes["n0"].world is None


def test_the_other_node_of_two_does_not_replace_the_host():
    job = Simulation(7, 2)
    job.run(3)
    job.net.island["n0"] = 1
    job.run(3 * PROMISE_S)
    assert not job.history.overlaps
    assert job.nodes["n1"].world is None
    assert job.nodes["n1"].office is None


def random_faults(seed: int, num_faults: int = 6) -> Simulation:
    """Run a job that meets random faults, and then none."""
    job = Simulation(seed, 3 + seed % 3)
    dice = job.dice
    for _ in range(num_faults):
        job.run(dice.uniform(0.2, 6))
        names = [name for name, node in job.nodes.items() if node.alive]
        fault = dice.choice(["cut", "halves", "heal", "heal", "crash", "slow", "host", "fast"])
        host = job.host()
        if fault == "cut" and names:
            job.net.island[dice.choice(names)] = dice.randint(1, 3)
        elif fault == "host" and host is not None:
            job.net.island[host.name] = 9
        elif fault == "halves":
            job.net.island = {name: dice.randint(0, 1) for name in job.nodes}
        elif fault == "heal":
            job.net.island = dict.fromkeys(job.nodes, 0)
        elif fault == "crash" and names and dice.random() < 0.4:
            job.nodes[dice.choice(names)].crash()
        elif fault == "slow":
            job.net.slow_s = dice.uniform(0.2, 1.5)
        elif fault == "fast":
            job.net.slow_s = 0.02
    job.net.island = dict.fromkeys(job.nodes, 0)
    job.net.slow_s = 0.05
    job.run(6 * PROMISE_S)
    return job


def hold(job: Simulation) -> None:
    """Assert both halves of the rule."""
    assert not job.history.overlaps, job.history.overlaps[:3]
    if job.has_majority():
        assert job.running(), {n.name: (n.alive, n.host) for n in job.nodes.values()}


@pytest.mark.parametrize("seed", range(12))
def test_random_faults_never_make_two_worlds_and_a_majority_continues(seed):
    hold(random_faults(seed))


@pytest.mark.slow
def test_2000_random_stories():
    continued = 0
    for seed in range(100, 2100):
        job = random_faults(seed, num_faults=8)
        hold(job)
        continued += len({world[0] for _, world in job.history.worlds}) > 1
    assert continued > 300, "too few of them elected anybody"
