"""Examples are shown as sessions on the site, whose packages are not among those of the tests."""

from __future__ import annotations

import pytest

pytest.importorskip("griffe", reason="the site's packages are not installed: make docs")

from tools.docs.example_sections import fenced


def test_an_example_is_fenced_and_what_follows_is_not():
    docstring = "Do it.\n\nExample:\n    >>> 1\n    1\n\n    >>> 2\n    2\n\nRaises:\n    E: x\n"
    assert fenced(docstring) == (
        "Do it.\n\nExample:\n    ```pycon\n    >>> 1\n    1\n\n    >>> 2\n    2\n    ```\n"
        "Raises:\n    E: x\n"
    )
    assert fenced("Do it.\n") == "Do it.\n"
