"""Draw a small line chart as SVG, without a plotting library."""

from __future__ import annotations

_WIDTH, _HEIGHT, _LEFT, _TOP, _RIGHT, _BOTTOM = 640, 380, 64, 48, 150, 44
_COLORS = ("#1b6ca8", "#c8553d", "#6b7a3a", "#7a5195")
_FONT = 'font-family="sans-serif" font-size="12" fill="#333"'
Series = tuple[str, dict[int, float]]


def draw(title: str, x_label: str, series: list[Series], dashed: Series) -> str:
    """Return an SVG of lines over evenly spaced x values; `dashed` is the theoretical line."""
    xs = sorted(series[0][1])
    top = max(max(line.values()) for _, line in [*series, dashed])
    step = 250 if top < 1600 else 500
    limit = (int(top / step) + 1) * step
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" {_FONT}>',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#fff"/>',
        f'<text x="{_LEFT}" y="24" font-size="14">{title}</text>',
    ]
    for value in range(0, limit + 1, step):
        y = _y(value, limit)
        parts.append(
            f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y}" y2="{y}" stroke="#ddd"/>'
            f'<text x="{_LEFT - 8}" y="{y + 4}" text-anchor="end">{value}</text>'
        )
    for index, x in enumerate(xs):
        parts.append(
            f'<text x="{_x(index, len(xs))}" y="{_HEIGHT - _BOTTOM + 18}" '
            f'text-anchor="middle">{x}</text>'
        )
    parts.append(
        f'<text x="{(_LEFT + _WIDTH - _RIGHT) / 2}" y="{_HEIGHT - 8}" '
        f'text-anchor="middle">{x_label}</text>'
    )
    ends = []
    for (name, line), color in zip(
        [*series, dashed], [*_COLORS[: len(series)], "#888"], strict=True
    ):
        style = ' stroke-dasharray="5 4"' if name == dashed[0] else ""
        points = [(_x(index, len(xs)), _y(line[x], limit)) for index, x in enumerate(xs)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(
            f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"{style}/>'
        )
        for x, y in points:
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{color}"/>')
        ends.append((points[-1][1], f"{name}: {line[xs[-1]]:.0f}", color))
    below = 0.0
    for y, text, color in sorted(ends):
        below = max(y + 4, below + 15)  # labels do not overlap
        parts.append(
            f'<text x="{_WIDTH - _RIGHT + 8}" y="{below:.1f}" fill="{color}">{text}</text>'
        )
    return "\n".join([*parts, "</svg>", ""])


def _x(index: int, count: int) -> float:
    return _LEFT + 20 + (_WIDTH - _LEFT - _RIGHT - 40) * index / max(1, count - 1)


def _y(value: float, limit: float) -> float:
    return _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * value / limit
