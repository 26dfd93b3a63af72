"""A rank's side of everything that passes between stages in one step.

Where two neighbouring stages lie on one rank, things are handed over; else they go by mail. Sends
never block. Receives are posted a few computations ahead of need, and no earlier: one that is
pending for long means that something hangs.

[Note: what stands before a message] A backend may send a peer one message after the other, each
only once its receive is posted. So before a rank waits for a message it posts the receives of all
that its peer sends it before that one: the plan says which. Then nothing can stand in its way.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence

import torch

from echelon.dist.group import ProcessGroup
from echelon.dist.pipeline.execute.mail import GradientInbox, Inbox, Outbox, OutputInbox, Room
from echelon.dist.pipeline.plan.action import Action, Kind, computations
from echelon.dist.pipeline.plan.needs import Product, Thing, makes, needs
from echelon.dist.pipeline.plan.plan import Plan
from echelon.recorder import span

Tensors = list[torch.Tensor]
_SLICE_S = 0.002  # between two looks at the other inboxes, while one is waited for
_LONG_S = 0.2
_LOOK_S = 0.0005  # between two looks at a receive on a device
_NAMES = {Product.OUTPUT: "RECV_F", Product.INPUT_GRAD: "RECV_B"}


class Exchange:
    """Made anew for each step."""

    def __init__(
        self,
        group: ProcessGroup,
        plan: Plan,
        devices: Mapping[int, torch.device],
        rooms: dict[int, Room],
        *,
        backward: bool,
    ) -> None:
        """Set up the ways of this rank's stages.

        Args:
            group: the pipeline's ranks.
            plan: whose stages.
            devices: of this rank's stages.
            rooms: of each boundary; kept from step to step.
            backward: whether gradients come back.
        """
        self._group = group
        self._owner = plan.rank_of_stage
        self._rooms = rooms
        self._outbox = Outbox(group)
        self._here: dict[Thing, Tensors] = {}
        self._outputs: dict[int, OutputInbox] = {}  # by the stage that makes them
        self._gradients: dict[int, GradientInbox] = {}
        for stage, device in devices.items():
            before, after = stage - 1, stage + 1
            if self._is_elsewhere(before):
                order = _order(plan, before, Kind.FORWARD)
                source = self._owner[before]
                self._outputs[before] = OutputInbox(
                    group, source, order, before, device, rooms.setdefault(before, {})
                )
            if backward and self._is_elsewhere(after):
                order = _order(plan, after, Kind.BACKWARD, Kind.INPUT_GRAD)
                self._gradients[after] = GradientInbox(group, self._owner[after], order, stage)
        self._inboxes: list[Inbox] = [*self._outputs.values(), *self._gradients.values()]
        sources = {inbox.source for inbox in self._inboxes}
        self._coming = {source: self._sent_by(plan, source) for source in sources}

    def want(self, actions: Iterable[Action]) -> None:
        """Post the receives of what some computations to come need."""
        for action in actions:
            for thing in needs(action, len(self._owner)):
                inbox = self._inbox(thing)
                if inbox is not None:
                    inbox.want(thing.microbatch)
        self._advance()

    def put(self, thing: Thing, tensors: Sequence[torch.Tensor]) -> None:
        """Give away what a computation made: a stage's outputs, or the gradients of its inputs."""
        forth = thing.product is Product.OUTPUT
        to = thing.stage + (1 if forth else -1)
        if not self._is_elsewhere(to):
            self._here[thing] = list(tensors)
        elif forth:
            if to in self._gradients:
                self._gradients[to].expect(thing.microbatch, tensors)
            room = self._rooms.setdefault(thing.stage, {})
            self._outbox.outputs(thing.stage, self._owner[to], thing.microbatch, tensors, room)
        else:
            self._outbox.gradients(to, self._owner[to], tensors)

    def take(self, thing: Thing, action: Action) -> Tensors:
        """Return what a computation needs; block until it has come.

        Outputs come as leaves that require gradients where their maker's did.

        Raises:
            CollectiveError: the rank that makes it is lost, or did not send within the group's
                timeout.
        """
        inbox = self._inbox(thing)
        if inbox is None:
            tensors = self._here.pop(thing)
            if thing.product is Product.OUTPUT:
                return [one.detach().requires_grad_(one.requires_grad) for one in tensors]
            return tensors
        self._await(inbox, thing, action)
        return inbox.take(thing.microbatch)

    def finish(self) -> None:
        """Block until everything that was sent is gone.

        Raises:
            CollectiveError: a receiver is lost or did not come.
        """
        while (to := self._outbox.pending()) is not None:
            with span("pipeline", f"the step's end waits in SEND for rank {self._group.ranks[to]}"):
                self._outbox.wait()

    def _await(self, inbox: Inbox, thing: Thing, action: Action) -> None:
        inbox.want(thing.microbatch)
        self._advance()
        if self._is_in(inbox, thing.microbatch):
            return
        self._let_in(inbox.source, thing)
        rank = self._group.ranks[inbox.source]
        what = f"{action} waits in {_NAMES[thing.product]} for {_text(thing)} of rank {rank}"
        with span("pipeline", what):
            while not self._is_in(inbox, thing.microbatch):
                self._advance()
                work = inbox.next_work(thing.microbatch)
                if work is None:
                    continue
                if work.operation.device == "cpu":
                    work.pending.wait(_SLICE_S if len(self._inboxes) > 1 else _LONG_S)
                else:  # there `wait` orders streams and returns at once
                    time.sleep(_LOOK_S)

    def _sent_by(self, plan: Plan, source: int) -> deque[Thing]:
        """Return what a rank sends to this one, in its order."""
        made = (thing for action in computations(plan.rows[source]) for thing in makes(action))
        return deque(thing for thing in made if self._inbox(thing) is not None)

    def _let_in(self, source: int, thing: Thing) -> None:
        """Post what a rank sends before a thing; see the note above."""
        coming = self._coming[source]
        if thing not in coming:
            return
        before = None
        while before != thing:
            before = coming.popleft()
            inbox = self._inbox(before)
            assert inbox is not None, before
            inbox.want(before.microbatch)

    def _is_in(self, inbox: Inbox, microbatch: int) -> bool:
        return inbox.has(microbatch) and inbox.next_work(microbatch) is None

    def _advance(self) -> None:
        for inbox in self._inboxes:
            inbox.advance()

    def _inbox(self, thing: Thing) -> Inbox | None:
        if thing.product is Product.OUTPUT:
            return self._outputs.get(thing.stage)
        return self._gradients.get(thing.stage) if thing.product is Product.INPUT_GRAD else None

    def _is_elsewhere(self, stage: int) -> bool:
        inside = 0 <= stage < len(self._owner)
        return inside and self._owner[stage] != self._group.rank


def _order(plan: Plan, stage: int, *kinds: Kind) -> list[int]:
    """Return in which order a stage makes its outputs, or the gradients of its inputs."""
    row = plan.rows[plan.rank_of_stage[stage]]
    return [a.microbatch for a in computations(row) if a.stage == stage and a.kind in kinds]


def _text(thing: Thing) -> str:
    kind = "F" if thing.product is Product.OUTPUT else "B"
    return f"{thing.stage}{kind}{thing.microbatch}"
