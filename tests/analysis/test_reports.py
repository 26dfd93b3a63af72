"""How a report is shown: terminal, page, trace. Recorded strings are hostile until cleaned."""

from __future__ import annotations

import dataclasses
import html
import json
import re
import shutil
import subprocess
from io import StringIO
from pathlib import Path

import pytest
from imagined_job import Job
from rich.console import Console

from echelon.analysis.diagnose import report_of
from echelon.analysis.evidence.picture import Picture, take_picture
from echelon.analysis.evidence.timing import timing_of
from echelon.analysis.finding import rank_list, seconds
from echelon.analysis.report.clean import clean
from echelon.analysis.report.page.graph import draw
from echelon.analysis.report.page.render import render_html, write_html
from echelon.analysis.report.page.timeline import MAX_BOXES, timeline
from echelon.analysis.report.text import render_text
from echelon.analysis.report.trace import events, write_trace
from echelon.analysis.watch import Watch

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"
ESCAPES = "\x1b[2J\x1b]0;owned\x07\u202egnp.exe\r\nforged line [bold red]x[/]"


def hung(size: int = 4, rank: int = 2) -> Job:
    job = Job(size).train(3)
    for other in job.others(rank):
        other.step().all_reduce(inside=True, site="train.py:20 backward")
    job[rank].span("compute").stands("tokenize.py", 88, "wait_for_tokenizer")
    return job


def hostile() -> Job:
    job = Job(3)
    for rank in job.ranks:
        rank.call("all_reduce", group=EVIL + ESCAPES, ranks=(0, 1, 2), site=f"{EVIL}{ESCAPES}:7 f")
        rank.span(EVIL + ESCAPES, open_=False)
    for rank in job.others(1):
        rank.call("all_reduce", group=EVIL + ESCAPES, ranks=(0, 1, 2), inside=True)
    job[1].span("data_wait", detail=EVIL, site=f"../../../{ESCAPES}:1 {EVIL}")
    job[1].host["stacks"] = (
        f'Thread 0x1 (most recent call first):\n  File "{EVIL}", line 1 in {EVIL}\n'
    )
    return job


def picture_of(job: Job, kind: str = "stall") -> Picture:
    return take_picture(job.evidence(kind))


def text_of(job: Job, width: int = 80, kind: str = "stall") -> str:
    out = StringIO()
    picture = picture_of(job, kind)
    console = Console(file=out, width=width, force_terminal=False)
    render_text(report_of(picture), console, timing_of(picture))
    return out.getvalue()


# ---- the terminal ----


def test_the_verdict_comes_first_and_fits_a_screen() -> None:
    lines = text_of(hung()).splitlines()
    assert "VERDICT" in lines[0]
    assert "host_hang · rank 2" in lines[0]
    assert "tokenize.py:88 in wait_for_tokenizer" in lines[1]
    assert len(lines) <= 24


def test_a_thousand_ranks_fit_too() -> None:
    assert len(text_of(hung(300, 77)).splitlines()) <= 24


def test_a_healthy_report_shows_where_the_time_went() -> None:
    text = text_of(Job(3).train(4), kind="")
    assert "HEALTHY" in text
    assert "all_reduce(float32[64], sum)" in text
    assert "communication" in text


def test_nothing_recorded_reaches_the_terminal_raw() -> None:
    text = text_of(hostile(), width=200)
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", text)
    assert "VERDICT" in text.splitlines()[0]
    assert not any(line.startswith("forged line") for line in text.splitlines())


@pytest.mark.parametrize("text", [ESCAPES, "a\u2028b", "x\x9b31m", "\ud800"])
def test_clean(text: str) -> None:
    shown = clean(text)
    assert shown.isprintable()
    shown.encode()


def test_clean_keeps_letters_of_all_scripts_and_shortens() -> None:
    assert clean("größe 模型") == "größe 模型"
    assert len(clean("x" * 10_000)) == 2000


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        ([3], "rank 3"),
        ([0, 1], "ranks 0 and 1"),
        ([0, 1, 2, 3], "ranks 0-3"),
        ([0, 1, 3], "ranks 0, 1 and 3"),
        ([0, 2, 4, 6, 8, 10, 12, 14], "ranks 0, 2, 4, 6, 8, 10 and 2 more"),
        ([], "no rank"),
    ],
)
def test_rank_list(ranks: list[int], words: str) -> None:
    assert rank_list(ranks) == words


def test_seconds() -> None:
    assert [seconds(s) for s in (0.00084, 0.031, 31.24, 250.9)] == [
        "840 us",
        "31 ms",
        "31.2 s",
        "4 min 10 s",
    ]


# ---- the page ----


def page_of(job: Job) -> str:
    picture = picture_of(job)
    return render_html(picture, report_of(picture))


def test_the_page_needs_nothing_beside_it() -> None:
    page = page_of(hung())
    assert not re.search(r"(?:src|href)\s*=|url\((?!#)|@import|https?://", page)
    assert "default-src 'none'" in page


def test_the_page_starts_with_the_verdict() -> None:
    page = page_of(hung())
    assert page.index("host_hang") < page.index("<canvas")
    assert "tokenize.py:88 in wait_for_tokenizer" in page


def test_recorded_markup_is_inert() -> None:
    page = page_of(hostile())
    assert "<img" not in page
    assert page.count("<script") == 2
    assert page.count("</script>") == 2
    assert "alert(1)" in html.unescape(page)


def data_of(page: str) -> dict[str, object]:
    block = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert block is not None
    return json.loads(block[1])


def test_the_data_block_is_json_that_cannot_end_its_element() -> None:
    page = page_of(hostile())
    data = data_of(page)
    assert data["culprits"] == [1]
    assert EVIL in data["timeline"]["kinds"][0]["site"] + data["timeline"]["kinds"][0]["group"]


def test_the_number_of_boxes_is_bounded() -> None:
    job = Job(64).train(40)
    shown = timeline(picture_of(job))
    assert sum(len(row["ops"]) // 5 for row in shown["rows"]) <= MAX_BOXES
    assert [row["rank"] for row in shown["rows"]] == list(range(64))


def test_open_operations_reach_to_the_end() -> None:
    shown = timeline(picture_of(hung()))
    waiting = shown["rows"][0]["ops"][-5:]
    assert waiting[1] == -1
    assert shown["kinds"][waiting[2]]["op"] == "all_reduce"
    assert shown["stall"] == waiting[0]
    assert shown["end"] > 29_000_000


def test_ranks_that_wait_alike_are_one_node() -> None:
    drawing = draw(picture_of(hung(300, 77)).graph)
    assert len(drawing.nodes) == 2
    assert len(drawing.edges) == 1
    assert drawing.nodes[drawing.edges[0].target].ranks == (77,)


def test_a_ring_is_drawn() -> None:
    job = Job(4).train(1)
    for rank in job.ranks:
        rank.all_reduce(group="a" if rank.rank < 2 else "b", ranks=(0, 1, 2, 3), inside=True)
    drawing = draw(picture_of(job).graph)
    assert {(edge.source, edge.target) for edge in drawing.edges} == {(0, 1), (1, 0)}
    assert 'id="waits"' in page_of(job)


# ---- the page in a browser ----

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
SPY = "<script>window.faults=[];addEventListener('error',e=>faults.push(e.message));</script>"
ACT = """<script>
const out = document.createElement("output"), root = document.documentElement;
const at = () => root.dataset.view;
const canvas = document.getElementById("timeline"), box = canvas.getBoundingClientRect();
const seen = {ready: root.dataset.ready, first: at()};
document.getElementById("in").click(); seen.zoomed = at();
document.getElementById("fit").click(); seen.whole = at();
const place = {clientX: box.left + 300, clientY: box.top + 40, cancelable: true};
canvas.dispatchEvent(new WheelEvent("wheel", {deltaY: -200, ...place}));
seen.wheeled = at();
document.getElementById("stall").click(); seen.trouble = at();
for (let px = 100; px < box.width && !seen.tip; px += 3) {
  const move = {clientX: box.left + px, clientY: box.top + 36};
  canvas.dispatchEvent(new PointerEvent("pointermove", move));
  const tip = document.getElementById("tip");
  if (tip.style.display === "block") seen.tip = tip.textContent;
}
const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
const colors = new Set();
for (let n = 0; n < pixels.length; n += 4 * 97) colors.add(pixels.slice(n, n + 3).join());
seen.colors = colors.size;
seen.faults = faults;
out.id = "seen"; out.textContent = JSON.stringify(seen); document.body.append(out);
</script>"""


def browser() -> str:
    found = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip(f"no browser found ({', '.join(BROWSERS)})")
    return found


def look(page: str, folder: Path) -> dict[str, object]:
    """Open a page from a file in a headless browser, use it, and return what was seen."""
    path = folder / "page.html"
    spied = page.replace("<head>", f"<head>{SPY}", 1).replace("</body>", f"{ACT}</body>", 1)
    path.write_text(spied, encoding="utf-8")
    command = [
        browser(), "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic",
        "--no-first-run", "--disable-background-networking", "--disable-component-update",
        "--disable-sync", f"--user-data-dir={folder / 'profile'}", "--window-size=1200,1400",
        "--dump-dom", path.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    found = re.search(r'<output id="seen">(.*?)</output>', done.stdout, re.DOTALL)
    assert found is not None, done.stdout[-500:] + done.stderr[-500:]
    return json.loads(html.unescape(found[1]))


@pytest.mark.ranks
@pytest.mark.parametrize("size", [4, 1024])
def test_the_page_opens_zooms_and_answers_the_pointer(tmp_path: Path, size: int) -> None:
    browser()  # before the page is made: else there is nothing to do
    seen = look(page_of(hung(size, 2)), tmp_path)
    assert seen["faults"] == []
    assert seen["ready"] == "yes"

    def width(name: str) -> int:
        begin, end = (int(n) for n in str(seen[name]).split())
        return end - begin

    assert width("zoomed") * 2 == pytest.approx(width("first"), rel=0.01)
    assert width("whole") > width("trouble")
    assert width("wheeled") < width("whole")
    assert seen["tip"].startswith("rank ")
    assert seen["colors"] > 3


@pytest.mark.ranks
def test_recorded_markup_does_nothing_in_a_browser(tmp_path: Path) -> None:
    seen = look(page_of(hostile()), tmp_path)
    assert seen["faults"] == []
    assert seen["ready"] == "yes"


# ---- the trace ----


def test_the_trace_is_json_that_viewers_take(tmp_path: Path) -> None:
    job = hung()
    write_trace(picture_of(job).evidence, tmp_path / "trace.json")
    trace = json.loads((tmp_path / "trace.json").read_text())
    operations = [e for e in trace["traceEvents"] if e.get("cat") == "collective"]
    assert {event["pid"] for event in operations} == {0, 1, 2, 3}
    assert all(
        event["ph"] == "X" and event["dur"] >= 0 and event["ts"] >= 0 for event in operations
    )
    open_ones = [event for event in operations if "still inside" in event["name"]]
    assert len(open_ones) == 3
    assert all(event["dur"] > 29e6 for event in open_ones)
    assert any(event["name"] == "compute (open)" for event in trace["traceEvents"])


def test_the_trace_of_nothing(tmp_path: Path) -> None:
    write_trace(picture_of(Job(1)).evidence, tmp_path / "trace.json")
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]


def test_names_in_the_trace_are_clean() -> None:
    text = json.dumps(list(events(picture_of(hostile()).evidence)))
    assert "\\u001b" not in text
    assert "\\u202e" not in text


def test_the_page_and_trace_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from echelon.analysis.cli import main

    folder = hung().write(tmp_path / "incident_0")
    page, trace = tmp_path / "a.html", tmp_path / "a.json"
    assert main([str(folder), "--html", str(page), "--trace", str(trace)]) == 1
    assert capsys.readouterr().out.endswith(f"\n  wrote {page}\n  wrote {trace}\n")
    assert main([str(folder), "--html", str(page), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)
    assert page.read_text().startswith("<!doctype html>")
    assert json.loads(trace.read_text())
    assert main([str(folder), "--html", str(tmp_path / "no" / "where.html")]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_write_html_writes_what_render_html_returns(tmp_path: Path) -> None:
    picture = picture_of(hung())
    report = report_of(picture)
    write_html(picture, report, tmp_path / "a.html")
    assert (tmp_path / "a.html").read_text(encoding="utf-8") == render_html(picture, report)


# ---- watching ----


def test_watch_tells_only_what_is_new(tmp_path: Path) -> None:
    told: list[str] = []
    seen = Watch(
        tmp_path / "run",
        lambda report: told.append(report.verdict.cause.value),
        lambda text: told.append(text.split(":")[0]),
    )
    seen.look()
    Job(3).train(2).write(tmp_path / "run" / "dump" / "incident_0", kind="signal")
    seen.look()
    seen.look()
    assert seen.exit_code == 0
    hung(3, 1).write(tmp_path / "run" / "dump" / "incident_1")
    seen.look()
    seen.look()
    assert [line.partition(" (")[0] for line in told] == [
        "waiting", "3 ranks, nothing is wrong", "host_hang",
    ]  # fmt: skip
    assert seen.exit_code == 1


def test_what_is_not_a_terminal_is_neither_wrapped_nor_padded() -> None:
    job = Job(4).train(2)
    for rank in job.others(1):
        rank.all_reduce(inside=True)
    job[1].stands("a_file_with_a_long_name_that_would_be_broken_over_two_lines.py", 8, "wait")
    report = job.report()
    out = StringIO()
    render_text(report, Console(file=out, width=40))
    lines = out.getvalue().splitlines()
    assert f"  {report.verdict.summary}" in lines
    assert all(line == line.rstrip() for line in lines)


def test_wrapped_lines_stay_indented_on_a_terminal() -> None:
    job = hung()
    for rank in job.others(2):
        rank.stands("a_training_loop.py", 20, "backward_of_all_buckets")
    report = report_of(picture_of(job))
    report = dataclasses.replace(report, origin="incident /a/folder/with/a/name/that/is/too/long")
    out = StringIO()
    render_text(report, Console(file=out, width=40, force_terminal=True, color_system=None))
    lines = [line.rstrip() for line in out.getvalue().splitlines()]
    assert [line for line in lines[1:] if line and not line.startswith("  ")] == []
    place = lines.index(f"{' ' * 14}a_training_loop.py:20 in")
    assert lines[place - 1].startswith(f"{' ' * 14}3 ranks")
