"""Describe what a job is waiting for."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from echelon.launcher.coordinator import decide
from echelon.launcher.coordinator.gathering.roster import Roster
from echelon.launcher.coordinator.world import World
from echelon.launcher.options.options import Options

_MAX_RANKS = 8  # listed by number


def why_roster_waits(roster: Roster, options: Options) -> str:
    """Describe what an incomplete world is waiting for."""
    hosts = ", ".join(node.host for node in roster.nodes)
    few = f"{len(roster.nodes)} of {options.min_nodes} required nodes connected ({hosts})"
    meeting = options.rendezvous
    if meeting is None or not meeting.stays_here:
        return few
    return f"{few}; only launchers on this machine can reach {meeting.address}"


def why_world_waits(world: World, awaited: Collection[str]) -> str:
    """Describe what a world is waiting for; return "" while its ranks are running.

    Args:
        awaited: the nodes whose dumps have not all arrived yet.
    """
    if world.clearing is not None and not world.clearing:
        return "the verdict, which decides whether to restart"
    if world.clearing:
        return f"processes that workers left behind on {_hosts(world, world.clearing)}"
    if world.attempt.phase in (decide.Phase.STOPPING, decide.Phase.KILLING):
        return f"{_ranks(world.attempt.running)} to end"
    if awaited:
        return f"diagnostics from {_hosts(world, awaited)}"
    return ""


def _ranks(ranks: Sequence[int]) -> str:
    names = [str(rank) for rank in ranks[:_MAX_RANKS]]
    if len(names) < 2:
        return f"rank {names[0]}" if names else "the ranks"
    if len(ranks) > _MAX_RANKS:
        return f"ranks {', '.join(names)} and {len(ranks) - _MAX_RANKS} more"
    return f"ranks {', '.join(names[:-1])} and {names[-1]}"


def _hosts(world: World, nodes: Collection[str]) -> str:
    return ", ".join(sorted(map(world.hosts.__getitem__, nodes)))
