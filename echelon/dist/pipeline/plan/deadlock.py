"""Detect deadlocks between ranks that execute their rows in order, and find the cause.

There are two execution models. With asynchronous messages, as in echelon's executor, an action
waits only for the data that it needs. `rendezvous` is the strictest possible model: a send
blocks its rank until the peer reaches the receive, and a receive blocks its rank until the peer
reaches the send. A plan that completes in the strictest model completes in any model.
"""

from __future__ import annotations

from echelon.dist.pipeline.plan.action import Action, Kind
from echelon.dist.pipeline.plan.needs import Thing, makes, needs
from echelon.dist.pipeline.plan.plan import Plan, PlanError

_COUNTERPART = {
    Kind.SEND_F: (Kind.RECV_F, 1),
    Kind.RECV_F: (Kind.SEND_F, -1),
    Kind.SEND_B: (Kind.RECV_B, -1),
    Kind.RECV_B: (Kind.SEND_B, 1),
}


def counterpart(message: Action) -> Action:
    """Return the receive that matches a send, or the send that matches a receive."""
    kind, step = _COUNTERPART[message.kind]
    return Action(message.stage + step, kind, message.microbatch)


def find_deadlock(plan: Plan, *, rendezvous: bool = False) -> PlanError | None:
    """Return the error that describes a deadlock, or None if all ranks reach the end of their rows.

    Args:
        plan: the plan, with messages if `rendezvous` is set; otherwise messages are ignored.
        rendezvous: whether sends and receives block their rank until the peer reaches the matching
            action.
    """
    machine = _Machine(plan, rendezvous)
    return machine.why() if machine.run() else None


def blocked(plan: Plan) -> PlanError:
    """Return the error for a plan that is known to deadlock."""
    error = find_deadlock(plan)
    assert error is not None, plan
    return error


class _Machine:
    """The simulated ranks, and how far each has advanced in its row."""

    def __init__(self, plan: Plan, rendezvous: bool) -> None:
        self._plan = plan
        self._rendezvous = rendezvous
        self._num_stages = plan.num_stages
        self._owner = dict(enumerate(plan.rank_of_stage))
        self._at = [0] * plan.num_ranks
        self._made: set[Thing] = set()

    def run(self) -> bool:
        """Advance all ranks as far as possible; return whether any rank is stuck."""
        going = True
        while going:
            going = False
            for rank in range(self._plan.num_ranks):
                while self._step(rank):
                    going = True
        return any(self._here(rank) for rank in range(self._plan.num_ranks))

    def why(self) -> PlanError:
        """Return an error that names the cycle of waits, or the single wait that can never end."""
        rank = next(r for r in range(self._plan.num_ranks) if self._here(r))
        seen: list[int] = []
        while rank not in seen:
            seen.append(rank)
            _, rank = self._lack(rank)
            if rank < 0:
                return self._error([seen[-1]])
        return self._error(seen[seen.index(rank) :])

    def _error(self, ring: list[int]) -> PlanError:
        first = min(ring)
        order = ring[ring.index(first) :] + ring[: ring.index(first)]
        places = [self._plan.place(rank, self._at[rank]) for rank in order]
        lacks = [self._lack(rank)[0] for rank in order]
        actions = [self._here(rank) for rank in order]
        if len(ring) == 1:
            return PlanError(f"{actions[0]} can never run: it waits for {lacks[0]}", *places[0])
        rest = "; ".join(
            f"row {row}, column {column}: {action} waits for {lack}"
            for (row, column), action, lack in list(zip(places, actions, lacks, strict=True))[1:]
        )
        return PlanError(f"deadlock: {actions[0]} waits for {lacks[0]}; {rest}", *places[0])

    def _here(self, rank: int) -> Action | None:
        row = self._plan.rows[rank]
        return row[self._at[rank]] if self._at[rank] < len(row) else None

    def _step(self, rank: int) -> bool:
        action = self._here(rank)
        if action is None:
            return False
        if action.kind in _COUNTERPART and self._rendezvous:
            return self._meet(rank, action)
        if any(thing not in self._made for thing in needs(action, self._num_stages)):
            return False
        self._made.update(makes(action))
        self._at[rank] += 1
        return True

    def _meet(self, rank: int, action: Action) -> bool:
        other = counterpart(action)
        peer = self._owner.get(other.stage, -1)
        if peer < 0 or self._here(peer) != other:
            return False
        self._at[rank] += 1
        self._at[peer] += 1
        return True

    def _lack(self, rank: int) -> tuple[str, int]:
        """Return what a blocked rank is waiting for, and the rank that must provide it.

        The rank is -1 if no other rank can provide it.
        """
        action = self._here(rank)
        if action is None:
            return "nothing", -1
        if action.kind in _COUNTERPART:
            other = counterpart(action)
            return f"{other} of rank {self._owner[other.stage]}", self._owner[other.stage]
        lacking = [t for t in needs(action, self._num_stages) if t not in self._made]
        thing = next((t for t in lacking if self._owner[t.stage] != rank), lacking[0])
        maker = self._owner[thing.stage]
        words = f"the {thing.product.value} of stage {thing.stage}, micro-batch {thing.microbatch}"
        return f"{words}, from rank {maker}", maker if maker != rank else -1
