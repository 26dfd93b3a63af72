"""Exchange tensors between this rank's stages and the adjacent stages during a step.

Tensors are passed directly between stages on the same rank, and are sent between stages on
different ranks. Sends never block. Receives are posted no later than in the plan that
`add_messages` returns (see the note in `lower.py`), and usually a few computations earlier.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from echelon.dist.group import ProcessGroup
from echelon.dist.pipeline.execute.messages.header import Tensors
from echelon.dist.pipeline.execute.messages.incoming import Incoming
from echelon.dist.pipeline.execute.messages.links import Link
from echelon.dist.pipeline.execute.messages.outgoing import Outgoing
from echelon.dist.pipeline.plan.action import Action, Kind, computations
from echelon.dist.pipeline.plan.needs import Product, Thing, makes, needs
from echelon.dist.pipeline.plan.plan import Plan
from echelon.recorder import span

_NAMES = {Product.OUTPUT: "RECV_F", Product.INPUT_GRAD: "RECV_B"}


class Routes:
    """The planned source and destination of each tensor that this rank exchanges."""

    def __init__(self, plan: Plan, rank: int) -> None:
        self.owner = plan.rank_of_stage
        self.rank = rank
        self._num_stages = plan.num_stages
        self._needed: dict[Action, list[Thing]] = {}
        self._sent = {peer: self._sent_by(plan, peer) for peer in self.peers()}

    def peers(self) -> list[int]:
        """Return the other ranks that hold a stage adjacent to one of this rank's stages."""
        pairs = zip(self.owner, self.owner[1:], strict=False)
        near = {other for pair in pairs if self.rank in pair for other in pair}
        return sorted(near - {self.rank})

    def sent_by(self, peer: int, *, backward: bool) -> list[Thing]:
        """Return the outputs and, if `backward`, the gradients that a peer sends to this rank.

        The results are in the order in which the peer sends them.
        """
        return [one for one in self._sent[peer] if backward or one.product is Product.OUTPUT]

    def destination(self, thing: Thing) -> int | None:
        """Return the rank that receives a computation's result, or None if no rank needs it."""
        to = thing.stage + {Product.OUTPUT: 1, Product.INPUT_GRAD: -1}.get(thing.product, 0)
        if to == thing.stage or not 0 <= to < self._num_stages:
            return None
        return self.owner[to]

    def source(self, thing: Thing) -> int:
        """Return the rank that computes an output or a gradient."""
        return self.owner[thing.stage]

    def needed(self, action: Action) -> list[Thing]:
        """Return the outputs and gradients that a computation needs from other ranks."""
        wanted = self._needed.get(action)
        if wanted is None:  # the same in every step
            every = needs(action, self._num_stages)
            wanted = [thing for thing in every if self.source(thing) != self.rank]
            self._needed[action] = wanted
        return wanted

    def _sent_by(self, plan: Plan, peer: int) -> list[Thing]:
        made = (thing for action in computations(plan.rows[peer]) for thing in makes(action))
        return [thing for thing in made if self.destination(thing) == self.rank]


class Exchange:
    """One rank's part in the exchange of tensors between stages, for one step.

    Args:
        group: the pipeline's ranks.
        routes: this rank's routes.
        links: this rank's links to its peers.
        device: the device of this rank's stages.
        backward: whether gradients are exchanged too.
    """

    def __init__(
        self,
        group: ProcessGroup,
        routes: Routes,
        links: Mapping[int, Link],
        device: torch.device,
        *,
        backward: bool,
    ) -> None:
        self._group = group
        self._routes = routes
        self._backward = backward
        self._here: dict[Thing, Tensors] = {}
        self._outgoing = {peer: Outgoing(link) for peer, link in links.items()}
        self._incoming = {
            peer: Incoming(link, routes.sent_by(peer, backward=backward), device)
            for peer, link in links.items()
        }

    def want(self, things: Sequence[Thing]) -> None:
        """Mark `things` as needed, and post all receives that can be posted now."""
        for thing in things:
            self._incoming[self._routes.source(thing)].want(thing)
        for incoming in self._incoming.values():
            incoming.advance()

    def want_for(self, *actions: Action) -> None:
        """Call `want` with the data that the given computations need."""
        self.want([thing for action in actions for thing in self._routes.needed(action)])

    def put(self, thing: Thing, tensors: Sequence[torch.Tensor]) -> None:
        """Pass a stage's outputs, or the gradients of its inputs, to the stage that needs them."""
        to = self._routes.destination(thing)
        assert to is not None, thing
        if to == self._routes.rank:
            self._here[thing] = list(tensors)
        elif thing.product is Product.INPUT_GRAD:
            self._outgoing[to].gradients(tensors)
        else:
            self._outgoing[to].outputs(thing, tensors)
            if self._backward:
                gradient = Thing(Product.INPUT_GRAD, thing.stage + 1, thing.microbatch)
                self._incoming[to].expect(gradient, tensors)

    def take(self, thing: Thing, action: Action) -> Tensors:
        """Return the tensors that a computation needs, blocking until they have arrived.

        Outputs arrive as leaves, which require gradients if the sent tensors do. On a device, the
        current stream waits for the data, and the host waits only for the headers.

        Raises:
            CollectiveError: the sending rank was lost, or did not send within the group's timeout.
        """
        source = self._routes.source(thing)
        if source == self._routes.rank:
            tensors = self._here.pop(thing)
            if thing.product is Product.OUTPUT:
                return [one.detach().requires_grad_(one.requires_grad) for one in tensors]
            return tensors
        incoming = self._incoming[source]
        incoming.want(thing)
        if incoming.is_here(thing):
            return incoming.take(thing)
        rank = self._group.ranks[source]
        what = f"{action} waits in {_NAMES[thing.product]} for {_text(thing)} of rank {rank}"
        with span("pipeline", what):
            return incoming.take(thing)

    def finish(self) -> None:
        """Block until all sends have completed.

        Raises:
            CollectiveError: a receiver was lost or did not receive within the group's timeout.
        """
        for outgoing in self._outgoing.values():
            if outgoing.is_done:
                outgoing.finish()
                continue
            rank = self._group.ranks[outgoing.rank]
            with span("pipeline", f"the step's end waits in SEND for rank {rank}"):
                outgoing.finish()


def received(message: Action) -> Thing:
    """Return the output or gradient that a RECV_F or RECV_B action receives."""
    if message.kind is Kind.RECV_F:
        return Thing(Product.OUTPUT, message.stage - 1, message.microbatch)
    assert message.kind is Kind.RECV_B, message
    return Thing(Product.INPUT_GRAD, message.stage + 1, message.microbatch)


def _text(thing: Thing) -> str:
    kind = "F" if thing.product is Product.OUTPUT else "B"
    return f"{thing.stage}{kind}{thing.microbatch}"
