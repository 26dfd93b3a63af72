"""Draw a simulated plan as an SVG, with one lane per rank and the critical path outlined."""

from __future__ import annotations

from xml.sax.saxutils import escape

from echelon.dist.pipeline.plan.action import Action, Kind
from echelon.dist.pipeline.plan.plan import counted
from echelon.dist.pipeline.simulation.simulator import Simulation, Slot

_COLORS = {  # the first chunk's; later ones are lighter
    Kind.FORWARD: (66, 133, 201),
    Kind.BACKWARD: (76, 154, 88),
    Kind.INPUT_GRAD: (222, 137, 44),
    Kind.WEIGHT_GRAD: (146, 110, 184),
}
_WORDS = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.INPUT_GRAD: "input gradients",
    Kind.WEIGHT_GRAD: "weight gradients",
}
_LANE, _LEFT, _TOP, _BOTTOM = 26, 52, 30, 44
_WIDTH = 1160


def draw_svg(simulation: Simulation) -> str:
    """Return the picture as SVG text."""
    scale = (_WIDTH - _LEFT - 10) / (simulation.makespan or 1.0)
    height = _TOP + _LANE * len(simulation.slots) + _BOTTOM
    critical = {(slot.rank, slot.action) for slot in simulation.critical_path}
    plan = simulation.plan
    title = (
        f"{plan.name}: {counted(plan.num_ranks, 'rank')}, "
        f"{counted(plan.num_microbatches, 'micro-batch')}; makespan {simulation.makespan:g}, "
        f"bubble {simulation.bubble:.1%}, peak activations {max(simulation.peak_activations)}"
    )
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}">',
        '<g font-family="sans-serif" font-size="11">',
        f'<rect width="{_WIDTH}" height="{height}" fill="#ffffff"/>',
        f'<text x="{_LEFT}" y="18" font-size="13" fill="#222">{escape(title)}</text>',
    ]
    origin = min(slot.start for row in simulation.slots for slot in row)
    for rank, row in enumerate(simulation.slots):
        top = _TOP + _LANE * rank
        parts.append(f'<text x="8" y="{top + 17}" fill="#222">rank {rank}</text>')
        parts.append(
            f'<rect x="{_LEFT}" y="{top}" width="{_WIDTH - _LEFT - 10}" height="{_LANE - 3}" '
            'fill="#f0f0f0"/>'
        )
        stages = plan.stages_of(rank)
        for slot in row:
            outlined = (slot.rank, slot.action) in critical
            parts += _slot(slot, stages, origin, scale, top, outlined)
    parts += _legend(height)
    return "\n".join([*parts, "</g></svg>"]) + "\n"


def _slot(
    slot: Slot, stages: tuple[int, ...], origin: float, scale: float, top: int, outlined: bool
) -> list[str]:
    parts = slot.action.computations
    share = _LANE - 3 if len(parts) == 1 else (_LANE - 3) / len(parts)
    left = _LEFT + (slot.start - origin) * scale
    width = max(1.0, (slot.end - slot.start) * scale)
    out = [
        _box(part, stages.index(part.stage), left, top + share * number, width, share)
        for number, part in enumerate(parts)
    ]
    if outlined:
        out.append(
            f'<rect x="{left + 0.75:.1f}" y="{top + 0.75}" width="{width - 1.5:.1f}" '
            f'height="{_LANE - 4.5}" fill="none" stroke="#c0392b" stroke-width="1.5"/>'
        )
    return out


def _box(part: Action, chunk: int, left: float, top: float, width: float, height: float) -> str:
    red, green, blue = (int(c + (255 - c) * min(0.6, 0.35 * chunk)) for c in _COLORS[part.kind])
    box = (
        f'<rect x="{left:.1f}" y="{top:.1f}" width="{width:.1f}" height="{height:.1f}" '
        f'fill="rgb({red},{green},{blue})" stroke="#ffffff" stroke-width="0.5">'
        f"<title>{part}</title></rect>"
    )
    if width < 9:
        return box
    middle, foot, size = left + width / 2, top + height / 2 + 4, min(11, height - 1)
    return box + (
        f'<text x="{middle:.1f}" y="{foot:.1f}" font-size="{size:.0f}" text-anchor="middle" '
        f'fill="#fff">{part.microbatch}</text>'
    )


def _legend(height: int) -> list[str]:
    out, left, top = [], _LEFT, height - 30
    for kind, (red, green, blue) in _COLORS.items():
        out.append(
            f'<rect x="{left}" y="{top}" width="14" height="14" fill="rgb({red},{green},{blue})"/>'
            f'<text x="{left + 19}" y="{top + 11}" fill="#222">{_WORDS[kind]}</text>'
        )
        left += 130
    out.append(
        f'<rect x="{left}" y="{top}" width="14" height="14" fill="none" stroke="#c0392b" '
        f'stroke-width="1.5"/><text x="{left + 19}" y="{top + 11}" fill="#222">critical path; '
        "numbers are micro-batches, lighter is a later chunk</text>"
    )
    return out
