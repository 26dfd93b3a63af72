"""Under random losses, cuts and delays, there are never two worlds and a majority continues."""

from __future__ import annotations

import pytest

from echelon.launcher.election.mandate import WITNESS
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


_FAULTS = ("cut", "halves", "heal", "heal", "crash", "slow", "host", "fast")


def random_faults(seed: int, num_faults: int = 6, *, has_witness: bool = False) -> Simulation:
    """Run a job that meets random faults, and then none."""
    job = Simulation(seed, (2 if has_witness else 3) + seed % 3, has_witness=has_witness)
    dice, faults = job.dice, list(_FAULTS)
    everyone = [*job.nodes, *([WITNESS] if has_witness else [])]
    if has_witness:
        faults += ["forget", "blind", "deaf"]
    for _ in range(num_faults):
        job.run(dice.uniform(0.2, 6))
        names = [name for name, node in job.nodes.items() if node.alive]
        fault = dice.choice(faults)
        host = job.host()
        if fault == "cut" and names:
            job.net.island[dice.choice(names)] = dice.randint(1, 3)
        elif fault == "host" and host is not None:
            job.net.island[host.name] = 9
        elif fault == "halves":
            job.net.island = {name: dice.randint(0, 1) for name in everyone}
        elif fault == "heal":
            job.net.island = dict.fromkeys(everyone, 0)
            job.net.deaf = set()
        elif fault == "crash" and names and dice.random() < 0.4:
            job.nodes[dice.choice(names)].crash()
        elif fault == "slow":
            job.net.slow_s = dice.uniform(0.2, 1.5)
        elif fault == "fast":
            job.net.slow_s = 0.02
        elif fault == "forget":
            job.witness.restart()
        elif fault == "blind":
            job.net.island[WITNESS] = 8
        elif fault == "deaf":
            job.net.deaf = {frozenset(dice.sample(everyone, 2))}
    job.net.island = dict.fromkeys(everyone, 0)
    job.net.deaf = set()
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


@pytest.mark.parametrize("how", ["crash", "cut"])
def test_a_witness_lets_one_of_two_nodes_replace_the_host(how):
    job = Simulation(3, 2, has_witness=True)
    job.run(5)
    assert job.running() == {(0, 0)}
    if how == "crash":
        job.nodes["n0"].crash()
    else:
        job.net.island["n0"] = 1
    job.run(3 * PROMISE_S + 4)
    assert not job.history.overlaps
    (world,) = job.running()
    assert world[0] >= 1
    assert job.nodes["n1"].world == world


def test_the_loss_of_the_witness_costs_nothing():
    job = Simulation(4, 2, has_witness=True)
    job.run(5)
    job.net.island[WITNESS] = 1
    job.run(3 * PROMISE_S)
    assert job.running() == {(0, 0)}
    job.nodes["n1"].crash()
    job.run(3 * PROMISE_S)
    assert job.running() == {(0, 1)}, "as without a witness, the host continues alone"


def test_nodes_that_lose_each_other_and_not_the_witness_do_not_make_two_worlds():
    job = Simulation(5, 2, has_witness=True)
    job.run(5)
    job.net.deaf = {frozenset({"n0", "n1"})}
    job.run(3 * PROMISE_S)
    assert not job.history.overlaps
    assert job.running() == {(0, 1)}, "the witness has promised itself to the host"


@pytest.mark.parametrize("seed", range(12))
def test_random_faults_with_a_witness_that_forgets(seed):
    hold(random_faults(seed, has_witness=True))


@pytest.mark.slow
def test_2000_random_stories_with_a_witness():
    continued = 0
    for seed in range(100, 2100):
        job = random_faults(seed, num_faults=8, has_witness=True)
        hold(job)
        continued += len({world[0] for _, world in job.history.worlds}) > 1
    assert continued > 300, "too few of them elected any node"


@pytest.mark.slow
def test_2000_random_stories():
    continued = 0
    for seed in range(100, 2100):
        job = random_faults(seed, num_faults=8)
        hold(job)
        continued += len({world[0] for _, world in job.history.worlds}) > 1
    assert continued > 300, "too few of them elected anybody"
