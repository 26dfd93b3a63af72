"""Choose the nodes of the next world as nodes join and leave.

A world begins once at least `min_nodes` nodes are connected and one of these conditions holds:

- `max_nodes` nodes are connected.
- At least one node of the previous world has stayed connected and is not to be avoided.
- The last call has ended.

The last call is a short grace period for nodes that were started together but connect at different
times. It lasts at most 3 s by default. Nodes that connect later wait for the next world as spares.
At most `spares` nodes can wait. Nodes to be avoided, such as nodes that failed repeatedly, are
chosen only if too few other nodes are connected.

Ranks are assigned in node order. In the first world, nodes with a `--node-rank` come first, sorted
by that rank. The coordinator's node comes next, followed by the other nodes in natural order of
their host names. In later worlds, nodes retain their positions in this order, and a new node takes
the position of a lost node.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

LAST_CALL_S = 3.0
_LAST_CALL_STEP_S = 1.0  # the wait after each join for the next one


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """A node that is connected or is asking to join."""

    name: str
    host: str
    num_workers: int
    node_rank: int = -1
    is_host: bool = False
    address: str = ""  # numeric, as the hosting node sees it; "" for that node itself

    @property
    def order(self) -> tuple[object, ...]:
        """The node's sort key; the module docstring describes the order."""
        rank = self.node_rank if self.node_rank >= 0 else 1 << 30
        parts = re.split(r"(\d+)", self.host)
        natural = tuple((1, int(p), "") if p.isdigit() else (0, 0, p) for p in parts)
        return rank, not self.is_host, natural, self.name


class Roster:
    """The connected nodes, and the choice of nodes for each world."""

    def __init__(
        self,
        min_nodes: int,
        max_nodes: int,
        *,
        spares: int,
        join_timeout_s: float,
        last_call_s: float | None = None,
    ) -> None:
        self._min = min_nodes
        self._max = max_nodes
        self._spares = spares
        self._join_timeout_s = join_timeout_s
        self._last_call = last_call_s
        self._nodes: dict[str, Node] = {}
        self._former: tuple[str, ...] = ()  # names of the last world's nodes, by place
        self._awaited: frozenset[str] = frozenset()  # those of them that have not left since
        self._avoided: frozenset[str] = frozenset()
        self._opened_s = 0.0
        self._enough_since_s: float | None = None
        self._latest_join_s = 0.0

    @property
    def nodes(self) -> tuple[Node, ...]:
        """All connected nodes."""
        return tuple(self._nodes.values())

    def resume(self, former: Sequence[str]) -> None:
        """Adopt the nodes of a former host's world, so that they retain their positions."""
        self._former = tuple(former)
        self._awaited = frozenset(name for name in former if name in self._nodes)

    def open(self, now_s: float) -> None:
        """Begin gathering nodes for a world; all time limits are measured from `now_s`."""
        self._opened_s = self._latest_join_s = now_s
        self._enough_since_s = now_s if len(self._nodes) >= self._min else None

    def join(self, node: Node, now_s: float) -> str:
        """Add a node; return "" on success, or the reason for refusing it."""
        if self.count_without(()) >= self._max + self._spares:
            nodes, spares = _count(self._max, "node"), _count(self._spares, "spare")
            return f"the job already has {nodes} and {spares}"
        if node.node_rank >= 0 and any(n.node_rank == node.node_rank for n in self.nodes):
            return f"another node already has --node-rank {node.node_rank}"
        self._nodes[node.name] = node
        self._latest_join_s = now_s
        if self._enough_since_s is None and len(self._nodes) >= self._min:
            self._enough_since_s = now_s
        return ""

    def avoid(self, names: Sequence[str]) -> None:
        """Leave the given nodes out of new worlds while enough other nodes are connected."""
        self._avoided |= set(names)

    @property
    def avoided(self) -> tuple[str, ...]:
        """The names of the nodes that join a new world only if it would otherwise be too small."""
        return tuple(sorted(self._avoided))

    def count_without(self, names: Sequence[str]) -> int:
        """Return how many nodes are connected, excluding the given nodes and the nodes to avoid."""
        return len(self._nodes.keys() - self._avoided - set(names))

    def _eligible(self) -> dict[str, Node]:
        """Return the nodes, keyed by name, from which the next world is chosen."""
        good = {name: node for name, node in self._nodes.items() if name not in self._avoided}
        return good if len(good) >= self._min else self._nodes

    def leave(self, name: str) -> None:
        """Remove a node."""
        self._nodes.pop(name, None)
        self._awaited -= {name}  # it may reconnect, but no world waits for it
        if len(self._nodes) < self._min:
            self._enough_since_s = None

    def world(self, now_s: float) -> Sequence[Node] | None:
        """Return the next world's nodes in rank order, or None if the world is not complete yet."""
        if len(self._nodes) < self._min:
            return None
        nodes = self._eligible()
        full = len(nodes) >= self._max
        awaited = self._awaited - self._avoided
        back = bool(awaited) and awaited <= nodes.keys()
        if not full and not back and now_s < self._last_call_s():
            return None
        chosen = self._placed(nodes)
        self._former = tuple(node.name for node in chosen)
        self._awaited = frozenset(self._former)
        return chosen

    def _placed(self, nodes: Mapping[str, Node]) -> list[Node]:
        """Return the nodes chosen for the next world, in rank order."""
        others = sorted(
            (node for node in nodes.values() if node.name not in self._former),
            key=lambda node: node.order,
        )
        kept = [nodes.get(name) for name in self._former]
        vacant = [place for place, node in enumerate(kept) if node is None]
        for place, node in zip(vacant, others, strict=False):
            kept[place] = node
        placed = [node for node in kept if node is not None] + others[len(vacant) :]
        if not self._former or any(node.node_rank >= 0 for node in placed):
            placed.sort(key=lambda node: (node.name not in self._former, *node.order))
            chosen = placed[: self._max]
            return sorted(chosen, key=lambda node: node.order)
        return placed[: self._max]

    def deadline_s(self) -> float:
        """Return the time by which `world` must be called."""
        if self._enough_since_s is None:
            return self._opened_s + self._join_timeout_s
        return self._last_call_s()

    def has_failed(self, now_s: float) -> bool:
        """Return whether the join timeout has passed with too few nodes connected."""
        return self._enough_since_s is None and now_s >= self._opened_s + self._join_timeout_s

    def shortage(self) -> str:
        """Describe the shortage: how many nodes are required, and which nodes are connected."""
        came = ", ".join(node.host for node in self._nodes.values()) or "none"
        return (
            f"{len(self._nodes)} of {self._min} required nodes connected within "
            f"{self._join_timeout_s:g} s ({came})"
        )

    def _last_call_s(self) -> float:
        assert self._enough_since_s is not None
        if self._last_call is not None:
            return self._enough_since_s + self._last_call
        latest = self._enough_since_s + LAST_CALL_S
        return min(latest, max(self._latest_join_s, self._enough_since_s) + _LAST_CALL_STEP_S)


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
