"""Draw the wait-for graph as SVG."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from echelon.analysis.finding import rank_list
from echelon.analysis.report.clean import safe
from echelon.analysis.report.page.graph import Drawing

_NODE_HEIGHT, _COLUMN, _ROW = 34, 420, 54


def render_graph(drawing: Drawing, culprits: set[int]) -> str:
    """Return the graph as a section of the page, or "" if no rank is waiting."""
    if not drawing.edges:
        return ""
    deepest = max(node.layer for node in drawing.nodes)
    filled = [0] * (deepest + 1)
    leaps = any(
        drawing.nodes[e.source].layer - drawing.nodes[e.target].layer > 1 for e in drawing.edges
    )
    top = 58 if leaps else 16
    places: list[_Box] = []
    for node in drawing.nodes:
        label = rank_list(node.ranks, 3)
        x = (deepest - node.layer) * _COLUMN + 4
        places.append(_Box(label, x, filled[node.layer] * _ROW + top))
        filled[node.layer] += 1
    shapes = [_edge(drawing, places, number) for number in range(len(drawing.edges))]
    for node, box in zip(drawing.nodes, places, strict=True):
        kind = ' class="bad"' if culprits & set(node.ranks) else ""
        shapes.append(f"<g{kind}>{box.svg()}</g>")
    width = deepest * _COLUMN + max(box.width for box in places) + 140
    rings = any(
        drawing.nodes[e.source].layer < drawing.nodes[e.target].layer for e in drawing.edges
    )
    height = (max(filled) - 1) * _ROW + _NODE_HEIGHT + top + (58 if rings else 8)
    marker = (
        '<defs><marker id="tip-of-edge" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" '
        'markerHeight="8" orient="auto"><path d="M0 0 8 4 0 8z"/></marker></defs>'
    )
    return (
        '<section id="waits"><h2>Who waits for whom</h2><div class="scroll">'
        f'<svg width="{width}" height="{height}" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="wait-for graph">{marker}{"".join(shapes)}</svg></div></section>'
    )


@dataclass(frozen=True, slots=True)
class _Box:
    """A node with its position in the drawing."""

    label: str
    x: int
    y: int

    @property
    def width(self) -> int:
        return max(90, 26 + 7 * len(self.label))

    @property
    def center(self) -> int:
        return self.x + self.width // 2

    @property
    def middle(self) -> int:
        return self.y + _NODE_HEIGHT // 2

    def svg(self) -> str:
        text_x, text_y = self.x + self.width // 2, self.y + 22
        return (
            f'<rect x="{self.x}" y="{self.y}" width="{self.width}" height="{_NODE_HEIGHT}" rx="8"/>'
            f'<text x="{text_x}" y="{text_y}" text-anchor="middle">{safe(self.label)}</text>'
        )


def _edge(drawing: Drawing, places: Sequence[_Box], number: int) -> str:
    edge = drawing.edges[number]
    source, target = places[edge.source], places[edge.target]
    gap = drawing.nodes[edge.source].layer - drawing.nodes[edge.target].layer
    x1, y1, x2, y2 = source.x + source.width, source.middle, target.x, target.middle
    if gap == 1:
        bend = (x2 - x1) // 2
        path = f"M{x1} {y1} C{x1 + bend} {y1} {x2 - bend} {y2} {x2} {y2}"
        x, y = (x1 + x2) // 2, (y1 + y2) // 2 - 6
    elif gap > 1:  # above any nodes in between
        path = (
            f"M{source.center} {source.y} C{source.center} 6 "
            f"{target.center} 6 {target.center} {target.y}"
        )
        x, y = (source.center + target.center) // 2, 18
    elif gap < 0:  # backwards, to close a cycle
        low = max(source.y, target.y) + _NODE_HEIGHT
        path = (
            f"M{source.center} {source.y + _NODE_HEIGHT} C{source.center} {low + 46} "
            f"{target.center} {low + 46} {target.center} {target.y + _NODE_HEIGHT}"
        )
        x, y = (source.center + target.center) // 2, low + 48
    else:  # within a column: out at the right and back in from the right
        x2 = target.x + target.width
        reach = max(x1, x2) + 60 + 20 * (number % 4)
        path = f"M{x1} {y1 + 6} C{reach} {y1 + 6} {reach} {y2 - 6} {x2} {y2 - 6}"
        x, y = reach - 18, (y1 + y2) // 2 + 14 * (number % 3)
    return (
        f'<path class="edge" d="{path}" marker-end="url(#tip-of-edge)"/>'
        f'<text class="label" x="{x}" y="{y}" text-anchor="middle">{safe(edge.label)}</text>'
    )
