"""Draw a plot with one panel per figure, one color per run, and a label at the end of each line."""

from __future__ import annotations

import base64
import html
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from echelon.train.figures.series import Run, smoothed, width_for

# The palette of Okabe and Ito, which people with any color vision can distinguish; yellow is left
# out.
_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#444444")
_INK, _FAINT = "#333333", "#b8b8b8"
_PANEL_INCHES = (5.6, 2.5)


@dataclass(frozen=True, kw_only=True)
class Panel:
    """The settings for drawing one figure.

    Attributes:
        name: the figure's name in the log.
        title: the title of the panel, including the unit.
        scale: the factor by which the figure's values are multiplied.
        is_log: whether the axis is logarithmic when the values span more than a factor of ten.
        from_zero: whether the axis starts at 0.
        is_noisy: whether the figure is noisy; if so, a running median is also drawn.
        beside: the name and the label of a second figure, which is drawn dashed.
    """

    name: str
    title: str
    scale: float = 1.0
    is_log: bool = False
    from_zero: bool = False
    is_noisy: bool = True
    beside: tuple[str, str] = ("", "")


PANELS = (
    Panel(name="loss", title="Loss, nats per token", beside=("validation_loss", "validation")),
    Panel(name="gradient_norm", title="Gradient norm", is_log=True),
    Panel(name="learning_rate", title="Learning rate", from_zero=True, is_noisy=False),
    Panel(name="tokens_per_s", title="Tokens per second", from_zero=True),
    Panel(name="mfu", title="MFU, % of the peak", scale=100, from_zero=True),
    Panel(name="iteration_s", title="Time of an iteration, ms", scale=1e3, from_zero=True),
    Panel(
        name="peak_memory_bytes",
        title="Peak memory, GiB",
        scale=2**-30,
        from_zero=True,
        is_noisy=False,
    ),
    Panel(
        name="data_wait", title="Waiting for data, % of the iteration", scale=100, from_zero=True
    ),
    Panel(
        name="exposed_communication",
        title="Exposed communication, % of the iteration",
        scale=100,
        from_zero=True,
    ),
)


def plot(runs: Sequence[Run], out: Path, *, title: str = "") -> None:
    """Plot several runs on shared axes and save the plot; panels without data are omitted.

    Args:
        out: the file to write: a .png, .svg or .pdf, or a self-contained .html page.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: none of the runs has any data to plot.
        OSError: the file cannot be written.
    """
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError as err:
        raise ImportError(
            "`echelon plot` needs matplotlib: run `pip install 'echelon[figures]'`"
        ) from err
    panels = [panel for panel in PANELS if any(_has(run, panel) for run in runs)]
    if not panels:
        raise ValueError(
            f"{runs[0].path} contains none of these figures: {', '.join(p.name for p in PANELS)}"
        )
    with mpl.rc_context({"font.family": "sans-serif", "font.size": 9, "svg.fonttype": "none"}):
        picture = _draw(Figure, runs, panels, title)
        _save(picture, out, title or ", ".join(run.name for run in runs))


def _has(run: Run, panel: Panel) -> bool:
    return any(not math.isnan(value) for value in run.series(panel.name)[1])


def _draw(make: Any, runs: Sequence[Run], panels: Sequence[Panel], title: str) -> Any:
    num_columns = min(len(panels), 1 if len(panels) < 3 else 3 if len(panels) > 4 else 2)
    num_rows = -(-len(panels) // num_columns)
    width, height = _PANEL_INCHES
    picture = make(
        figsize=(width * num_columns, height * num_rows + (0.4 if title else 0.1)),
        layout="constrained", facecolor="white",
    )  # fmt: skip
    picture.get_layout_engine().set(w_pad=0.12, h_pad=0.1, wspace=0.04, hspace=0.06)
    places = picture.subplots(num_rows, num_columns, squeeze=False).ravel()
    bottom = {index for index in range(len(panels)) if index + num_columns >= len(panels)}
    for index, place in enumerate(places):
        if index >= len(panels):
            place.set_visible(False)
            continue
        _draw_panel(place, runs, panels[index])
        if index in bottom:
            place.set_xlabel("step", color=_INK, loc="right")
    if title:
        picture.suptitle(title, x=0.01, ha="left", fontsize=13, fontweight="bold", color=_INK)
    return picture


def _draw_panel(place: Any, runs: Sequence[Run], panel: Panel) -> None:
    ends: list[tuple[float, float, str, str]] = []  # step, value, text, color
    seen: list[float] = []
    for number, run in enumerate(runs):
        color = _COLORS[number % len(_COLORS)]
        steps, values = run.series(panel.name)
        values = [value * panel.scale for value in values]
        if not values:
            continue
        width = width_for(len(values)) if panel.is_noisy else 1
        line = smoothed(values, width)
        if width > 1:
            place.plot(steps, values, color=color, linewidth=0.6, alpha=0.22)
        place.plot(
            steps, line, color=color, linewidth=1.5, marker="o" if len(steps) == 1 else "",
            markersize=3, solid_capstyle="round",
        )  # fmt: skip
        seen += _inliers(values)
        ends += _end(steps, line, run.name if len(runs) > 1 else "", color)
        ends += _draw_beside(place, run, panel, color)
    _style(place, panel, seen)
    _label_ends(place, ends)


def _inliers(values: Sequence[float]) -> list[float]:
    """Return the values that the axis must cover: all except the highest 1% and the lowest 1%."""
    ordered = sorted(value for value in values if not math.isnan(value))
    cut = len(ordered) // 100
    return ordered[cut : len(ordered) - cut]


def _draw_beside(
    place: Any, run: Run, panel: Panel, color: str
) -> list[tuple[float, float, str, str]]:
    name, word = panel.beside
    steps, values = run.series(name) if name else ([], [])
    if not steps:
        return []
    values = [value * panel.scale for value in values]
    place.plot(
        steps, values, color=color, linewidth=1.0, linestyle=(0, (3, 2)), marker="o",
        markersize=2.5,
    )  # fmt: skip
    return _end(steps, values, word, color)


def _end(
    steps: Sequence[int], values: Sequence[float], text: str, color: str
) -> list[tuple[float, float, str, str]]:
    """Return a list with a label for a line's last finite value, or [] if no value is finite."""
    finite = [(s, v) for s, v in zip(steps, values, strict=True) if not math.isnan(v)]
    if not finite:
        return []
    step, value = finite[-1]
    return [(step, value, f"{text} {_short(value)}".strip(), color)]


def _short(value: float, num_digits: int = 3) -> str:
    """Format a number in few characters, such as 12.3k or 0.00031."""
    for limit, size, unit in ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if abs(value) >= limit:
            return f"{value / size:.{num_digits}g}{unit}"
    return f"{value:.{num_digits}g}" if abs(value) < 1000 else f"{value:.0f}"


def _style(place: Any, panel: Panel, seen: Sequence[float]) -> None:
    place.set_title(panel.title, loc="left", fontsize=10, color=_INK, pad=8)
    for side in ("top", "right", "left"):
        place.spines[side].set_visible(False)
    place.spines["bottom"].set_color(_FAINT)
    place.tick_params(colors=_INK, length=0, labelsize=8)
    place.tick_params(axis="x", length=3, color=_FAINT)
    place.grid(axis="y", color="#e8e8e8", linewidth=0.7)
    place.set_axisbelow(True)
    place.locator_params(axis="x", nbins=6, integer=True)
    place.yaxis.set_major_formatter(lambda value, _: _short(value, 6))
    positive = [value for value in seen if value > 0]
    if panel.is_log and positive and max(positive) > 10 * min(positive):
        place.set_yscale("log")
        place.yaxis.set_major_formatter(lambda value, _: _short(value, 6))
        place.yaxis.set_minor_formatter(lambda *_: "")
        return
    place.locator_params(axis="y", nbins=5)
    if panel.from_zero and seen:
        place.set_ylim(0, max(max(seen) * 1.08, 1e-12))
    elif seen and max(seen) > min(seen):
        room = 0.06 * (max(seen) - min(seen))
        place.set_ylim(min(seen) - room, max(seen) + room)


def _label_ends(place: Any, ends: list[tuple[float, float, str, str]]) -> None:
    """Draw the labels to the right of the lines, moving labels that would overlap."""
    if not ends:
        return
    right = max(end[0] for end in ends)
    spots = [(place.transData.transform((right, end[1]))[1], end) for end in ends]
    least = 11 * place.figure.dpi / 72  # of the labels' lines
    high = -math.inf
    for at, (_, value, text, color) in sorted(spots, key=lambda spot: spot[0]):
        moved = max(at, high + least)
        high = moved
        place.annotate(
            text, (right, value), xytext=(5, (moved - at) * 72 / place.figure.dpi),
            textcoords="offset points", color=color, fontsize=8, va="center",
            annotation_clip=False,
        )  # fmt: skip


def _save(picture: Any, out: Path, title: str) -> None:
    if out.suffix.lower() != ".html":
        picture.savefig(out, dpi=150)
        return
    drawn = io.BytesIO()
    picture.savefig(drawn, format="png", dpi=150)
    data = base64.b64encode(drawn.getvalue()).decode()
    name = html.escape(title)
    out.write_text(
        f'<!doctype html><meta charset="utf-8"><title>{name}</title>'
        f'<img alt="{name}" style="max-width:100%" src="data:image/png;base64,{data}">\n',
        encoding="utf-8",
    )
