"""Lower a plan of computations by adding messages and sharding actions.

[Note: one order for all messages] Both ends of a message are added to their rows at the same time
in a simulated execution. All rows therefore follow one total order, in which a send and its receive
are adjacent. Ranks that follow this order cannot wait for each other in a cycle, even if a send
blocks until its receiver has joined.
"""

from __future__ import annotations

from dataclasses import replace

from echelon.dist.pipeline.plan.action import MESSAGES, SHARDING, Action, Kind
from echelon.dist.pipeline.plan.check import required_messages
from echelon.dist.pipeline.plan.plan import Plan
from echelon.dist.pipeline.simulation.simulator import simulate

_MAKER = {
    Kind.SEND_F: (Kind.FORWARD,),
    Kind.SEND_B: (Kind.BACKWARD, Kind.INPUT_GRAD),
}
_Key = tuple[float, int, int]  # when, messages before computations, which message


def add_messages(plan: Plan) -> Plan:
    """Return the plan with the sends and receives that it needs between ranks.

    A plan that already has messages is returned unchanged.

    Raises:
        PlanError: an action can never run.
    """
    if any(action.kind in MESSAGES for row in plan.rows for action in row):
        return plan
    slots = simulate(plan).slots
    ended = {part: slot.end for row in slots for slot in row for part in slot.action.computations}
    owner = plan.rank_of_stage
    events: list[list[tuple[_Key, Action]]] = [
        [((slot.start, 1, number), slot.action) for number, slot in enumerate(row)] for row in slots
    ]
    for number, (sender, receiver) in enumerate(required_messages(plan)):
        makers = [Action(sender.stage, k, sender.microbatch) for k in _MAKER[sender.kind]]
        when = next(ended[maker] for maker in makers if maker in ended)
        for end in (sender, receiver):
            events[owner[end.stage]].append(((when, 0, number), end))
    rows = [[action for _, action in sorted(row, key=lambda event: event[0])] for row in events]
    return replace(plan, rows=rows, columns=())


def order_messages(plan: Plan) -> Plan:
    """Return the plan with its messages in one total order (see the module's note).

    Messages that the plan already has are replaced.
    """
    rows = [[action for action in row if action.kind not in MESSAGES] for row in plan.rows]
    return add_messages(replace(plan, rows=rows, columns=()))


def add_sharding(plan: Plan, keep: int | None = None) -> Plan:
    """Return the plan with sharding actions added, for stages whose parameters are sharded.

    A stage's parameters are gathered one computation before their use, and are released afterwards
    unless they are needed again soon. The stage's gradients are reduced once, after its last
    backward pass.

    Args:
        plan: a plan with or without messages; a plan that has sharding actions is returned
            unchanged.
        keep: parameters remain gathered if one of the next `keep` computations needs them; None
            means twice the number of stages on the rank.
    """
    if any(action.kind in SHARDING for row in plan.rows for action in row):
        return plan
    rows = [
        _shard_row(row, 2 * len(plan.stages_of(rank)) if keep is None else keep)
        for rank, row in enumerate(plan.rows)
    ]
    return replace(plan, rows=rows, columns=())


def _shard_row(row: list[Action], keep: int) -> list[Action]:
    used = [_stages(action) for action in row if action.is_compute]
    last_gradient = {
        part.stage: number
        for number, action in enumerate(a for a in row if a.is_compute)
        for part in action.computations
        if part.kind is not Kind.FORWARD
    }
    out: list[Action] = []
    whole: set[int] = set()
    number = -1
    for action in row:
        if not action.is_compute:
            out.append(action)
            continue
        number += 1
        soon = [stage for stages in used[number : number + 2] for stage in stages]
        for stage in dict.fromkeys(soon):
            if stage not in whole:
                whole.add(stage)
                out.append(Action(stage, Kind.UNSHARD))
        out.append(action)
        coming = {stage for stages in used[number + 1 : number + 1 + keep] for stage in stages}
        coming |= set(used[number + 1]) if number + 1 < len(used) else set()  # gathered ahead
        for stage in _stages(action):
            if stage not in coming:
                whole.discard(stage)
                out.append(Action(stage, Kind.RESHARD))
            if last_gradient.get(stage) == number:
                out.append(Action(stage, Kind.REDUCE_GRAD))
    return out


def _stages(action: Action) -> tuple[int, ...]:
    return tuple(dict.fromkeys(part.stage for part in action.computations))
