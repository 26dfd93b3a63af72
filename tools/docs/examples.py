"""The `Example:` sections of the public names' docstrings, as programs that a test runs.

An Example is written as a session (`>>> `). One that several ranks run says so in a comment: `# on
each of 2 ranks`; what it prints must then be the same on each.
"""

from __future__ import annotations

import doctest
import importlib
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tools import public_api

_SECTION = re.compile(r"^Example:\n((?:[ ]{4}.*\n|\n)+)", re.MULTILINE)
_RANKS = re.compile(r"# on each of (\d+) ranks")
_OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


@dataclass(frozen=True)
class Example:
    """The Example of one public name; its text is "" where the docstring has none."""

    name: str  # as it is imported: echelon.dist.init
    text: str

    @property
    def module(self) -> str:
        """The module whose public name it is."""
        return self.name.rpartition(".")[0]

    @property
    def num_ranks(self) -> int:
        """How many ranks run it."""
        found = _RANKS.search(self.text)
        return int(found[1]) if found else 1


def examples() -> Iterator[Example]:
    """Find the Example of every public class and function, each once."""
    seen = set()
    for path in public_api.MODULES:
        module = importlib.import_module(path)
        for name in public_api.public_names(module):
            value = getattr(module, name)
            if (inspect.isclass(value) or inspect.isfunction(value)) and value not in seen:
                seen.add(value)
                yield Example(f"{path}.{name}", section(inspect.getdoc(value) or ""))


def section(docstring: str) -> str:
    """Return the text of a docstring's `Example:` section; "" if it has none."""
    found = _SECTION.search(docstring + "\n")
    return inspect.cleandoc(found[1]) + "\n" if found else ""


def run(example: Example, names: dict[str, Any]) -> str:
    """Run an Example with some names in place.

    Returns:
        What was not as the Example shows; "" if all was.
    """
    test = doctest.DocTestParser().get_doctest(example.text, names, example.name, None, 0)
    if not test.examples:
        return f"{example.name}: its Example has no line that begins with >>>"
    told: list[str] = []
    doctest.DocTestRunner(verbose=False, optionflags=_OPTIONS).run(test, out=told.append)
    return "".join(told)
