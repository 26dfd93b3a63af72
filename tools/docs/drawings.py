"""Draw the diagrams of the docs: `python -m tools.docs.drawings` writes docs/images/*.svg.

A diagram has its own background and follows the reader's preference for light or dark mode, so it
is legible on any page. Text is stored as text, so it is searchable and scales with the page.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

IMAGES = Path(__file__).resolve().parents[2] / "docs" / "images"
_STYLE = """
  text { font: 14px system-ui, sans-serif; fill: #1f2937; }
  .small { font-size: 12px; fill: #4b5563; }
  .code { font-family: ui-monospace, monospace; font-size: 12px; }
  .bold { font-weight: 600; }
  .ground { fill: #ffffff; }
  .box { fill: #eef2ff; stroke: #6366f1; stroke-width: 1.5; }
  .plain { fill: #f3f4f6; stroke: #9ca3af; stroke-width: 1.5; }
  .ring { fill: #fef3c7; stroke: #d97706; stroke-width: 1.5; }
  .fault { fill: #fee2e2; stroke: #dc2626; stroke-width: 2; }
  .host { fill: none; stroke: #9ca3af; stroke-width: 1.5; stroke-dasharray: 6 4; }
  .line { fill: none; stroke: #4b5563; stroke-width: 1.5; }
  .head { fill: #4b5563; }
  @media (prefers-color-scheme: dark) {
    text { fill: #e5e7eb; }
    .small { fill: #b6bdc9; }
    .ground { fill: #1e2129; }
    .box { fill: #2a2f52; stroke: #818cf8; }
    .plain { fill: #2b303b; stroke: #7b8494; }
    .ring { fill: #44351a; stroke: #f0a83c; }
    .fault { fill: #4c2126; stroke: #f87171; }
    .host { stroke: #7b8494; }
    .line { stroke: #aab2c0; }
    .head { fill: #aab2c0; }
  }
"""
_MARKER = (
    '<marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" '
    'orient="auto-start-reverse"><path class="head" d="M0 0 L8 4 L0 8 z"/></marker>'
)
Point = tuple[float, float]


class Drawing:
    """An SVG image of boxes, arrows and text; later elements cover earlier ones."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self._head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}" role="img" aria-label="{escape(title)}">'
        )
        self._parts = [f'<rect class="ground" width="{width}" height="{height}" rx="8"/>']

    def box(self, at: Point, size: Point, *lines: str, kind: str = "box") -> None:
        """Draw a box that contains a title, and smaller lines below the title."""
        (x, y), (width, height) = at, size
        self._parts.append(
            f'<rect class="{kind}" x="{x}" y="{y}" width="{width}" height="{height}" rx="6"/>'
        )
        top = y + height / 2 + 5 - (len(lines) - 1) * 8.5
        for number, line in enumerate(lines):
            style = "small" if number else "bold"
            self.text((x + width / 2, top + number * 17), line, style=style)

    def text(self, at: Point, line: str, *, style: str = "", anchor: str = "middle") -> None:
        """Draw a line of text."""
        x, y = at
        place = f'x="{x:g}" y="{y:g}" text-anchor="{anchor}"'
        self._parts.append(f'<text class="{style}" {place}>{escape(line)}</text>')

    def note(self, at: Point, *lines: str) -> None:
        """Draw small lines of text on a background, centered at `at`, over earlier elements."""
        x, y = at
        width, height = 6.4 * max(map(len, lines)), 17 * len(lines) + 6
        place = f'x="{x - width / 2:g}" y="{y - height / 2:g}"'
        self._parts.append(f'<rect class="ground" {place} width="{width:g}" height="{height}"/>')
        for number, line in enumerate(lines):
            self.text((x, y - height / 2 + 15 + 17 * number), line, style="small")

    def arrow(self, *points: Point, both: bool = False) -> None:
        """Draw an arrow through the given points; with `both`, it has two heads."""
        path = " L".join(f"{x:g} {y:g}" for x, y in points)
        start = ' marker-start="url(#head)"' if both else ""
        self._parts.append(f'<path class="line" d="M{path}" marker-end="url(#head)"{start}/>')

    def frame(self, at: Point, size: Point, title: str) -> None:
        """Draw a dashed frame around the elements of one host."""
        (x, y), (width, height) = at, size
        self._parts.append(
            f'<rect class="host" x="{x}" y="{y}" width="{width}" height="{height}" rx="10"/>'
        )
        self.text((x + 12, y + 20), title, style="small", anchor="start")

    def svg(self) -> str:
        """Return the drawing as the text of an SVG file."""
        inside = [f"<style>{_STYLE}</style>", f"<defs>{_MARKER}</defs>", *self._parts]
        return "\n".join([self._head, *inside, "</svg>", ""])


def architecture() -> Drawing:
    """Draw a job: the launcher, its ranks, the files that they leave behind, and the verdict."""
    one = Drawing(960, 430, "The launcher starts ranks, reads their rings, and asks for a verdict")
    one.frame((20, 20), (640, 390), "one node")
    one.box((45, 60), (150, 64), "launcher", "echelon run: an agent")
    one.box((45, 300), (150, 64), "store", "where ranks meet")
    for number, x in enumerate((250, 390, 530)):
        one.box((x, 60), (106, 40), f"rank {number}", kind="plain")
        one.box((x, 108), (106, 40), "dist")
        one.box((x, 156), (106, 40), "recorder")
        one.box((x, 300), (106, 64), "ring", "a mapped file", kind="ring")
        one.arrow((x + 53, 196), (x + 53, 300))
    one.arrow((195, 80), (250, 80))
    one.text((222, 72), "starts", style="small")
    one.arrow((120, 124), (120, 300))
    one.text((128, 205), "hosts", style="small", anchor="start")
    one.arrow((356, 128), (390, 128), both=True)
    one.arrow((496, 128), (530, 128), both=True)
    one.arrow((195, 330), (215, 330), (215, 128), (250, 128), both=True)
    one.note(
        (443, 240), "each call, span and step: 192 bytes,", "written to memory, no system call"
    )
    one.arrow((583, 364), (583, 388), (32, 388), (32, 92), (45, 92))
    one.text(
        (320, 382),
        "read from outside, also while a rank hangs or once it was killed",
        style="small",
    )
    one.box((710, 60), (210, 64), "incident", "one dump per rank, stacks, logs", kind="ring")
    one.box((710, 180), (210, 64), "analysis", "fr-analyze: rules, without torch")
    one.box((710, 300), (210, 64), "verdict", "rank, cause, line, evidence", kind="fault")
    one.arrow((120, 60), (120, 36), (680, 36), (680, 92), (710, 92))
    one.text((400, 52), "on a stall or a failure: collects", style="small")
    one.arrow((815, 124), (815, 180))
    one.arrow((815, 244), (815, 300))
    return one


def waits() -> Drawing:
    """Draw which rank waits for which in the incident of `how-a-verdict-is-found.md`."""
    one = Drawing(720, 220, "Ranks 0 and 1 wait for ranks 2 and 3, rank 2 waits for rank 3")
    one.box((30, 30), (140, 64), "rank 0", "in world #9", kind="plain")
    one.box((30, 126), (140, 64), "rank 1", "in world #9", kind="plain")
    one.box((300, 78), (140, 64), "rank 2", "in pair #7", kind="plain")
    one.box((550, 78), (140, 64), "rank 3", "in no operation", kind="fault")
    one.arrow((170, 70), (300, 100))
    one.arrow((170, 150), (300, 122))
    one.arrow((170, 48), (620, 48), (620, 78))
    one.arrow((170, 174), (620, 174), (620, 142))
    one.arrow((440, 110), (550, 110))
    one.text((395, 40), "waits for", style="small")
    one.text((495, 102), "waits for", style="small")
    one.text((395, 192), "waits for", style="small")
    return one


def job() -> Drawing:
    """Draw the timeline of a job that stalls."""
    one = Drawing(960, 250, "A job's life: start, training, stall, collection, verdict, restart")
    steps = (
        ("start", ("one worker per", "rank, a store"), "plain"),
        ("train", ("each call in", "the ring"), "box"),
        ("stall", ("no progress", "for 5 s"), "fault"),
        ("look twice", ("did anything", "move since?"), "plain"),
        ("collect", ("stacks, rings,", "process states"), "ring"),
        ("verdict", ("root cause,", "next action"), "box"),
    )
    for number, (title, lines, kind) in enumerate(steps):
        x = 24 + number * 155
        one.box((x, 40), (130, 84), title, *lines, kind=kind)
        if number:
            one.arrow((x - 25, 82), (x, 82))
    one.arrow((399, 124), (399, 190), (244, 190), (244, 124))
    one.text((322, 208), "it did: no stall", style="small")
    one.arrow((864, 124), (864, 226), (89, 226), (89, 124))
    one.text((560, 218), "restart, if the verdict says that it can help", style="small")
    return one


DRAWINGS = {"architecture": architecture, "job": job, "waits": waits}


def main(images: Path = IMAGES, names: Sequence[str] = tuple(DRAWINGS)) -> None:
    """Write the named drawings to the folder `images`."""
    for name in names:
        (images / f"{name}.svg").write_text(DRAWINGS[name]().svg())


if __name__ == "__main__":
    main()
