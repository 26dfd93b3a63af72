"""Extract the `Example:` sections of the public names' docstrings, and run them as tests.

An Example is written as an interactive session (`>>> `). If several ranks must run it, it contains
a comment such as `# on each of 2 ranks`, and its output must be the same on each rank.
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
    """The Example of one public name; its text is "" if the docstring does not have an Example."""

    name: str  # as it is imported: echelon.dist.init
    text: str

    @property
    def module(self) -> str:
        """The module that exports the name."""
        return self.name.rpartition(".")[0]

    @property
    def num_ranks(self) -> int:
        """The number of ranks that run the Example."""
        found = _RANKS.search(self.text)
        return int(found[1]) if found else 1


def examples() -> Iterator[Example]:
    """Yield the Example of every public class and function once."""
    seen = set()
    for path in public_api.MODULES:
        module = importlib.import_module(path)
        for name in public_api.public_names(module):
            value = getattr(module, name)
            if (inspect.isclass(value) or inspect.isfunction(value)) and value not in seen:
                seen.add(value)
                yield Example(f"{path}.{name}", section(inspect.getdoc(value) or ""))


def section(docstring: str) -> str:
    """Return the text of a docstring's `Example:` section, or "" without such a section."""
    found = _SECTION.search(docstring + "\n")
    return inspect.cleandoc(found[1]) + "\n" if found else ""


def run(example: Example, names: dict[str, Any]) -> str:
    """Run an Example with the given global names.

    Returns:
        The differences between the actual and the shown output, or "" if they match.
    """
    test = doctest.DocTestParser().get_doctest(example.text, names, example.name, None, 0)
    if not test.examples:
        return f"{example.name}: its Example has no line that begins with >>>"
    told: list[str] = []
    doctest.DocTestRunner(verbose=False, optionflags=_OPTIONS).run(test, out=told.append)
    return "".join(told)
