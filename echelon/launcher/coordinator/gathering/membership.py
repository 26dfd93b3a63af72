"""Admit, refuse and dismiss nodes.

`Roster` decides which nodes take part in a world. This module sends each node the decision, and
makes the store accept clients from the addresses of admitted nodes.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from echelon.errors import LaunchError
from echelon.launcher.control import messages as m
from echelon.launcher.coordinator.decide import EndedBy
from echelon.launcher.coordinator.gathering.meeting import MeetingPlace
from echelon.launcher.coordinator.gathering.roster import Node, Roster
from echelon.launcher.options.options import Options


class Membership:
    """The part of the coordinator that admits, refuses and dismisses a job's nodes."""

    def __init__(
        self,
        options: Options,
        roster: Roster,
        meeting: MeetingPlace,
        send: Callable[[str, m.Command], None],
        say: Callable[[str], None],
    ) -> None:
        self._options = options
        self._roster = roster
        self._meeting = meeting
        self._send = send
        self._say = say

    def join(self, hello: m.Hello) -> bool:
        """Admit or refuse a node; return True if it was admitted.

        A refused node is sent the reason.
        """
        refusal = self._roster.join(self._node_of(hello), time.monotonic())
        if hello.version != m.VERSION:
            refusal = f"it uses protocol version {hello.version}, but this job uses {m.VERSION}"
        if refusal:
            text = f"rejected by the host: {refusal}"
            self._send(hello.node, m.Over(exit_code=1, ended_by="agent", text=text))
            self._roster.leave(hello.node)
            return False
        self._admit(hello)
        return True

    def host_of(self, node: str) -> str:
        """Return the host name of a node."""
        return next((one.host for one in self._roster.nodes if one.name == node), node)

    def let_go(self, node: str, number: int) -> None:
        """Make a node's launcher exit, because it received stop signal `number` from the user."""
        self._roster.leave(node)
        self._send(node, m.Over(exit_code=128 + number, ended_by=EndedBy.SIGNAL.value))

    def _node_of(self, hello: m.Hello) -> Node:
        return Node(
            name=hello.node,
            host=hello.host,
            num_workers=hello.num_workers,
            node_rank=hello.node_rank,
            is_host=hello.node == self._options.node_name,
            address=hello.address,
        )

    def _admit(self, hello: m.Hello) -> None:
        """Allow torch's store clients to connect from a node's address."""
        if not hello.address:
            return  # this node itself
        try:
            self._meeting.admit(hello.address)
        except LaunchError as err:
            self._say(f"{err}; torch's own store clients on {hello.host} cannot connect")
