"""Check that a plan can be executed; if it cannot, raise an error that locates the fault.

The checks are intended for plans that were written by hand.
"""

from __future__ import annotations

from collections.abc import Iterator

from echelon.dist.pipeline.plan.action import MESSAGES, SHARDING, Action, Kind, computations
from echelon.dist.pipeline.plan.deadlock import counterpart, find_deadlock
from echelon.dist.pipeline.plan.needs import makes, needs
from echelon.dist.pipeline.plan.plan import Plan, PlanError

_Place = tuple[int, int]  # rank, index in its row


def check_plan(plan: Plan) -> None:
    """Check that a plan is complete, in a valid order and free of deadlocks.

    Raises:
        PlanError: the plan is invalid; the error gives the fault's row and column, counted from 0.
    """
    index = _Index(plan)
    _check_stages(index)
    _check_completeness(plan, index)
    _check_order(plan, index)
    if any(action.kind in MESSAGES for row in plan.rows for action in row):
        _check_messages(plan, index)
    _check_sharding(plan)
    deadlock = find_deadlock(plan)
    if deadlock is not None:
        raise deadlock


class _Index:
    """The position of each action in a plan.

    All parts of an overlap share the overlap's position.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.at: dict[Action, _Place] = {}
        for rank, row in enumerate(plan.rows):
            for index, action in enumerate(row):
                for part in action.computations or (action,):
                    if part in self.at and part.kind not in SHARDING:
                        raise self.error((rank, index), f"{part} appears twice, {self.also(part)}")
                    self.at[part] = (rank, index)

    def error(self, place: _Place, message: str) -> PlanError:
        return PlanError(message, *self.plan.place(*place))

    def also(self, action: Action) -> str:
        row, column = self.plan.place(*self.at[action])
        return f"see row {row}, column {column}"


def _check_stages(index: _Index) -> None:
    owner: dict[int, Action] = {}
    for action, (rank, at) in index.at.items():
        if action.kind in MESSAGES or action.kind in SHARDING:
            continue
        first = owner.setdefault(action.stage, action)
        if index.at[first][0] != rank:
            raise index.error(
                (rank, at),
                f"{action}: stage {action.stage} is on another rank, {index.also(first)}",
            )
    for stage, owned in enumerate(sorted(owner)):
        if owned != stage:
            place = index.at[owner[owned]]
            raise index.error(place, f"there is a stage {owned} but no stage {stage}")


def _check_completeness(plan: Plan, index: _Index) -> None:
    for rank, row in enumerate(plan.rows):
        seen = list(computations(row))
        for stage in plan.stages_of(rank):
            for microbatch in range(plan.num_microbatches):
                _check_one(index, stage, microbatch, seen)


def _check_one(index: _Index, stage: int, microbatch: int, row: list[Action]) -> None:
    names = (Kind.FORWARD, Kind.BACKWARD, Kind.INPUT_GRAD, Kind.WEIGHT_GRAD)
    forward, whole, inputs, weights = (Action(stage, kind, microbatch) for kind in names)
    near = next(
        (a for a in (forward, whole, inputs, weights) if a in index.at),
        next(action for action in row if action.stage == stage),
    )
    place = index.at[near]
    if forward not in index.at:
        raise index.error(place, f"{forward} is missing")
    has_whole, has_inputs, has_weights = (a in index.at for a in (whole, inputs, weights))
    if has_whole and (has_inputs or has_weights):
        part = inputs if has_inputs else weights
        raise index.error(index.at[part], f"{part} is part of {whole}, {index.also(whole)}")
    if has_inputs and not has_weights:
        raise index.error(index.at[inputs], f"{inputs} is not followed by {weights}")
    if not has_whole and not has_inputs:
        raise index.error(place, f"both {whole} and {inputs} are missing")


def _check_order(plan: Plan, index: _Index) -> None:
    """Check that each computation follows all computations on its rank whose results it needs."""
    for rank, row in enumerate(plan.rows):
        own = {thing: action for action in computations(row) for thing in makes(action)}
        made = set()
        for at, action in enumerate(row):
            for part in action.computations:
                lacking = [t for t in needs(part, plan.num_stages) if t in own and t not in made]
                if lacking:
                    first = own[lacking[0]]
                    raise index.error((rank, at), f"{part} is before {first}, {index.also(first)}")
                made.update(makes(part))


def _check_messages(plan: Plan, index: _Index) -> None:
    owner = plan.rank_of_stage
    for sender, receiver in required_messages(plan):
        for end in (sender, receiver):
            if end not in index.at:
                other = receiver if end is sender else sender
                shown = other if other in index.at else _maker(sender, index)
                raise index.error(
                    index.at[shown], f"{shown} has no {end} on rank {owner[end.stage]}"
                )
    required = {end for pair in required_messages(plan) for end in pair}
    for action, place in index.at.items():
        if action.kind not in MESSAGES:
            continue
        if action not in required:
            raise index.error(place, f"{action}: no message is sent this way")
        if place[0] != owner[action.stage]:
            raise index.error(
                place, f"{action}: stage {action.stage} is on rank {owner[action.stage]}"
            )
    for sender, receiver in required_messages(plan):
        maker, user = _maker(sender, index), _user(receiver, index)
        if index.at[sender][1] < index.at[maker][1]:
            raise index.error(index.at[sender], f"{sender} is before {maker}, {index.also(maker)}")
        if index.at[receiver][1] > index.at[user][1]:
            raise index.error(index.at[receiver], f"{receiver} is after {user}, {index.also(user)}")


def required_messages(plan: Plan) -> Iterator[tuple[Action, Action]]:
    """Yield each send between stages on different ranks, paired with its receive."""
    owner = plan.rank_of_stage
    for stage in range(plan.num_stages - 1):
        if owner[stage] == owner[stage + 1]:
            continue
        for microbatch in range(plan.num_microbatches):
            for sender in (
                Action(stage, Kind.SEND_F, microbatch),
                Action(stage + 1, Kind.SEND_B, microbatch),
            ):
                yield sender, counterpart(sender)


def _maker(sender: Action, index: _Index) -> Action:
    forward = Action(sender.stage, Kind.FORWARD, sender.microbatch)
    return forward if sender.kind is Kind.SEND_F else _backward(sender, index)


def _user(receiver: Action, index: _Index) -> Action:
    forward = Action(receiver.stage, Kind.FORWARD, receiver.microbatch)
    return forward if receiver.kind is Kind.RECV_F else _backward(receiver, index)


def _backward(message: Action, index: _Index) -> Action:
    whole = Action(message.stage, Kind.BACKWARD, message.microbatch)
    return (
        whole if whole in index.at else Action(message.stage, Kind.INPUT_GRAD, message.microbatch)
    )


def _check_sharding(plan: Plan) -> None:
    """Check that a rank whose row has sharding actions gathers each stage before running it."""
    for rank, row in enumerate(plan.rows):
        if not any(action.kind in SHARDING for action in row):
            continue
        whole: set[int] = set()
        for at, action in enumerate(row):
            stages = [part.stage for part in action.computations] or [action.stage]
            if action.kind is Kind.UNSHARD:
                whole.add(action.stage)
            elif action.kind is Kind.RESHARD:
                whole.discard(action.stage)
            elif action.is_compute and not whole.issuperset(stages):
                stage = next(stage for stage in stages if stage not in whole)
                place = plan.place(rank, at)
                raise PlanError(f"{action} runs while stage {stage} is sharded", *place)
