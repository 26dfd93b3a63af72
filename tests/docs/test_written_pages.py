"""What scripts write into the documentation is what they would write today."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import pytest

from echelon.analysis import analyze
from tools.docs import blocks, drawings, incident, pictures

PAGE = (
    "# Top\n<!-- a: by x -->\nold\n<!-- end of a -->\nkept\n<!-- b: by x -->\n<!-- end of b -->\n"
)


def test_only_what_stands_between_the_marks_is_replaced():
    page = blocks.replaced(PAGE, {"a": "new\n"})
    assert page == PAGE.replace("old", "\nnew\n")
    assert blocks.replaced(page, {"a": "new"}) == page
    assert blocks.names(page) == ["a", "b"]


def test_a_part_without_a_place_is_an_error():
    with pytest.raises(ValueError, match="no <!-- c"):
        blocks.replaced(PAGE, {"c": "new"})


def test_the_kept_incident_leads_past_the_rank_that_waits_itself():
    verdict = analyze(incident.INCIDENT).verdict
    assert verdict is not None
    assert (verdict.cause.value, verdict.culprit_ranks) == ("host_hang", (3,))
    assert verdict.fallout_ranks == (0, 1, 2)


def test_the_page_shows_what_the_analysis_makes_of_the_incident():
    page = incident.PAGE.read_text()
    assert incident.written(page) == page, "run: python -m tools.docs.incident write"
    stale = page.replace("VERDICT  host_hang", "VERDICT  gil_hang")
    assert stale != page
    assert incident.written(stale) == page


def test_the_pages_program_is_the_one_whose_lines_are_named():
    lines = incident.program(incident.PAGE.read_text()).splitlines()
    assert "never set" in lines[13]  # two_groups.py:14


@pytest.mark.parametrize("name", sorted(drawings.DRAWINGS))
def test_a_drawing_is_what_its_script_draws(name):
    text = (drawings.IMAGES / f"{name}.svg").read_text()
    assert text == drawings.DRAWINGS[name]().svg(), "run: python -m tools.docs.drawings"
    assert ElementTree.fromstring(text).tag.endswith("svg")


def test_a_terminals_picture_has_its_words_colors_and_places():
    text = pictures.terminal(
        "show <it>", "\x1b[1;37;48;5;88m BAD \x1b[0m\x1b[2m a & b\x1b[0m\nplain\n"
    )
    tree = ElementTree.fromstring(text)
    words = {one.text: one for one in tree.iter("{http://www.w3.org/2000/svg}text")}
    assert list(words) == ["$ show <it>", " BAD ", " a & b", "plain"]
    grounds = [one.get("fill") for one in tree.iter("{http://www.w3.org/2000/svg}rect")]
    assert "#870000" in grounds
    assert words[" BAD "].get("font-weight") == "700"
    assert words[" a & b"].get("fill") != words["plain"].get("fill")
    assert float(words[" a & b"].get("x")) > float(words[" BAD "].get("x"))
    assert float(words["plain"].get("y")) > float(words[" BAD "].get("y"))


def test_a_command_is_run_on_a_terminal():
    printed = pictures.on_a_terminal(("sh", "-c", "test -t 1 && printf '\\033[1mbold' && exit 1"))
    assert printed == "\x1b[1mbold"
