"""docs/dump-format.md names every field that the files hold, and the version they carry."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from echelon.recorder.format import schema
from echelon.recorder.format.layout import LAST_WORDS_OFFSET, LIVE_OFFSET, OPEN_SPANS_OFFSET

PAGE = (Path(__file__).parents[3] / "docs" / "dump-format.md").read_text()
DTYPES = (
    schema.HEADER,
    schema.OPERATION_FIXED,
    schema.RECENT_HEAD,
    schema.SIGNATURE_FIXED,
    schema.KEPT_OPERATION,
    schema.OPERATION_STATE,
    schema.OPERATION,
    schema.SPAN_FIXED,
    schema.SPAN,
    schema.FAULT,
    schema.FAULT_FRAME,
)
CLASSES = (
    schema.Identity,
    schema.LastWords,
    schema.HostFacts,
    schema.Socket,
    schema.HostThread,
    schema.Fault,
)
# What is set as code; a name in prose does not count.
NAMES = {word for code in re.findall(r"`([^`]+)`", PAGE) for word in re.findall(r"\w+", code)}


@pytest.mark.parametrize(
    "name",
    sorted(
        {name for dtype in DTYPES for name in dtype.names or ()}
        | {field.name for one in CLASSES for field in fields(one)}
        | {word.name for word in schema.Live if word is not schema.Live.NUM_WORDS}
    ),
)
def test_a_field_is_on_the_page(name):
    assert name in NAMES


def test_the_page_is_of_this_version():
    assert f"now **{schema.FORMAT_MAJOR}.{schema.FORMAT_MINOR}**" in PAGE
    assert f"| {schema.FORMAT_MAJOR}.{schema.FORMAT_MINOR} |" in PAGE


def test_the_pages_offsets_are_right():
    assert f"| live words | {LIVE_OFFSET} |" in PAGE
    assert f"| last words | {LAST_WORDS_OFFSET} |" in PAGE
    assert f"| open spans | {OPEN_SPANS_OFFSET} |" in PAGE
