"""Lay out the wait-for graph, with one node per set of ranks that have the same waits."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from echelon.analysis.evidence.matching.waits import Wait, WaitGraph

MAX_NODES = 40


@dataclass(frozen=True, slots=True)
class Node:
    """A set of ranks that wait in the same operations and hold up the same other operations."""

    ranks: tuple[int, ...]
    layer: int  # 0: waits for no rank


@dataclass(frozen=True, slots=True)
class Edge:
    """An edge from waiting ranks to the ranks they are waiting for."""

    source: int
    target: int
    label: str


@dataclass(frozen=True, slots=True)
class Drawing:
    """The nodes, grouped into layers, and the edges between them."""

    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...]


def draw(graph: WaitGraph, roots: Iterable[int] = ()) -> Drawing:
    """Merge ranks that have the same waits, and lay out the nodes in layers.

    Args:
        roots: the ranks to put in the first layer if the waits form a cycle.
    """
    waits = [wait for wait in graph.waits if wait.absent]
    classes = _classes(waits)
    index = {rank: number for number, ranks in enumerate(classes) for rank in ranks}
    labels: dict[tuple[int, int], list[str]] = {}
    for wait in waits:
        sources = {index[rank] for rank in wait.waiting}
        targets = {index[rank] for rank in wait.absent}
        for pair in sorted((a, b) for a in sources for b in targets if a != b):
            labels.setdefault(pair, []).append(f"{wait} · {wait.group}")
    layers = _layers(len(classes), list(labels), sorted({index[r] for r in roots if r in index}))
    nodes = tuple(Node(ranks, layers[number]) for number, ranks in enumerate(classes))
    edges = tuple(Edge(a, b, " / ".join(texts[:2])) for (a, b), texts in labels.items())
    if len(nodes) <= MAX_NODES:
        return Drawing(nodes, edges)
    kept = sorted(range(len(nodes)), key=lambda n: (layers[n], nodes[n].ranks))[:MAX_NODES]
    place = {number: position for position, number in enumerate(kept)}
    return Drawing(
        tuple(nodes[number] for number in kept),
        tuple(Edge(place[e.source], place[e.target], e.label)
              for e in edges if e.source in place and e.target in place),
    )  # fmt: skip


def _classes(waits: list[Wait]) -> list[tuple[int, ...]]:
    roles: dict[int, list[tuple[int, bool]]] = {}
    for number, wait in enumerate(waits):
        for rank in wait.waiting:
            roles.setdefault(rank, []).append((number, True))
        for rank in wait.absent:
            roles.setdefault(rank, []).append((number, False))
    merged: dict[tuple[tuple[int, bool], ...], list[int]] = {}
    for rank in sorted(roles):
        merged.setdefault(tuple(roles[rank]), []).append(rank)
    return [tuple(ranks) for ranks in merged.values()]


def _layers(count: int, pairs: list[tuple[int, int]], roots: list[int]) -> list[int]:
    """Return each node's longest distance from the sinks.

    If the waits form a cycle, distances are measured from the roots instead.
    """
    layers = [0] * count
    for _ in range(count):
        late = [(a, b) for a, b in pairs if layers[a] <= layers[b]]
        if not late:
            return layers
        for source, target in late:
            layers[source] = max(layers[source], layers[target] + 1)
    return _nearest(count, pairs, roots or [0])


def _nearest(count: int, pairs: list[tuple[int, int]], roots: list[int]) -> list[int]:
    """Return each node's shortest distance from the roots.

    An unreachable node gets a greater distance than any reachable node.
    """
    layers = dict.fromkeys(roots, 0)
    edge = list(roots)
    while edge:
        edge = sorted({a for a, b in pairs if b in edge and a not in layers})
        layers.update({node: max(layers.values()) + 1 for node in edge})
    farthest = max(layers.values()) + 1
    return [layers.get(node, farthest) for node in range(count)]
