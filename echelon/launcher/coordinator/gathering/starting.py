"""Assign ranks to nodes, and build the commands that start a world."""

from __future__ import annotations

from collections.abc import Sequence

from echelon.launcher.control import messages as m
from echelon.launcher.control.conf import beat_s
from echelon.launcher.coordinator.gathering.meeting import MeetingPlace
from echelon.launcher.coordinator.gathering.roster import Node
from echelon.launcher.coordinator.world import World
from echelon.launcher.options.options import Options


def world_of(nodes: Sequence[Node], number: int, options: Options, now_mono_ns: int) -> World:
    """Return a new attempt on the given nodes.

    Args:
        nodes: the nodes in rank order.
        now_mono_ns: the current time on the clock by which the ranks' progress is measured.
    """
    return World.of(
        nodes,
        number=number,
        grace_s=options.shutdown_timeout_s,
        stop_on_stall=options.on_stall != "report",
        stall_timeout_s=options.stall_timeout_s,
        report_s=beat_s(len(nodes), options.conf.lost_after_s),
        now_mono_ns=now_mono_ns,
    )


def starts_of(
    world: World,
    options: Options,
    meeting: MeetingPlace,
    *,
    job_id: str,
    restart: int,
    resume: str = "",
    history: str = "",
) -> list[m.Start]:
    """Return the start commands for the nodes of a world, in node order.

    Args:
        restart: how many worlds of this job have ended so far.
        resume: the path of the job's newest committed checkpoint; "" if it has none.
        history: a JSON description of how the earlier attempts ended.
    """
    return [
        m.Start(
            attempt=world.number,
            restart=restart,
            max_restarts=options.max_restarts,
            job_id=job_id,
            world_size=max(world.size, ranks.stop),  # of a late node, the ranks have yet to join
            first_rank=ranks.start,
            num_workers=len(ranks),
            node_rank=index,
            num_nodes=len(world.nodes),
            master_addr=meeting.host,
            master_port=meeting.port,
            stall_timeout_ms=int(options.stall_timeout_s * 1000),
            torch_backend=options.torch_backend,
            resume=resume,
            history=history,
            sights_ms=int(1000 * beat_s(len(world.nodes), options.conf.lost_after_s)),
            learns_limits=options.learned_limits == "on",
            on_loss=options.on_loss if world.size > 1 or options.max_nodes > 1 else "end",
        )
        for index, ranks in enumerate(world.nodes.values())
    ]
