"""The public surface is a decision: names and signatures change only where the list does."""

from __future__ import annotations

import difflib

import pytest

pytest.importorskip("torch")

from tools import public_api


def test_the_public_surface_is_the_listed_one():
    now = public_api.surface().splitlines()
    listed = public_api.LISTED.read_text().splitlines()
    changes = list(difflib.unified_diff(listed, now, "listed", "now", lineterm="", n=0))
    assert not changes, "\n".join(
        [*changes, "If this is meant: python tools/public_api.py --write, and say it in CHANGELOG"]
    )


def test_a_changed_default_and_a_changed_type_change_the_list():
    def before(x: int = 1) -> None: ...
    def default(x: int = 2) -> None: ...
    def kind(x: float = 1) -> None: ...

    texts = {public_api._signature(one) for one in (before, default, kind)}
    assert texts == {"(x: int = 1) -> None", "(x: int = 2) -> None", "(x: float = 1) -> None"}
