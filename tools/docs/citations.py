"""Check that the citations in code type on a page exist.

A citation is a path from the repository's root, a path of a source file below a package, a dotted
name below `echelon`, a `make` target, an `ECHELON_` variable, an option, or a command with its
options. All other text in code type is ignored, because it may refer to the user's own code.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tools.docs import reference
from tools.docs.links import split_fences

_CODE = re.compile(r"`([^`\n]+)`")
_ROOTED = re.compile(r"^(?:docs|echelon|tests|benchmarks|examples|tools)/[\w./-]*$")
_SOURCE = re.compile(r"^[\w-]+(?:/[\w-]+)+\.(?:py|c|h|sh|md)$")
_NAME = re.compile(r"^echelon(?:\.[A-Za-z_]\w*)+(?=\(|$)")
_VARIABLE = re.compile(r"\bECHELON_[A-Z_]*[A-Z]\b")
_TARGET = re.compile(r"\bmake ([a-z][a-z-]*)\b")
_OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]+\b")
_COMMAND = re.compile(
    r"(?:^|[\s/])(?<!from )(echelon (?P<sub>[a-z]+)|fr-analyze)(?P<rest>(?: [^|&;#]*)?)$"
)
_SCRIPT = re.compile(r"\s(?:-m\s|\S+\.(?:py|sh)\b|SCRIPT|--(?:\s|$)).*")
# a table of options by name: examples/gpt/flags.py, the launcher's options without effect
_FIELD = re.compile(r"^\s+\"([a-z][a-z_-]+)\": [(\"]", re.MULTILINE)
_NOTE = re.compile(r"\[Note: ([^\]]+)\]")
# A note opens a line with its title; a citation of it is within a sentence.
_NOTE_TITLE = re.compile(r"^[ \t\"#*/]*\[Note: ([^\]]+)\](?=[ \t]*$| [\w`])", re.MULTILINE)
_SCHEDULERS = ("--kill-on-bad-exit", "--ntasks")  # of srun
_SOURCES = (".py", ".c", ".h", ".sh", ".yaml", ".sbatch")


@dataclass(frozen=True)
class Facts:
    """The names and paths that exist and may be cited."""

    root: Path
    files: frozenset[str]
    folders: frozenset[str]
    words: frozenset[str]  # options and variables in the sources
    targets: frozenset[str]
    options: dict[str, frozenset[str]]  # of each command, from its --help

    @classmethod
    def collect(cls, root: Path, files: frozenset[str]) -> Facts:
        """Collect the facts from the sources and from each command's `--help` output."""
        words: set[str] = set()
        for file in files:
            if file.endswith(_SOURCES) and not file.startswith("tests/"):
                text = (root / file).read_text()
                words.update(_OPTION.findall(text))
                words.update(f"--{word.replace('_', '-')}" for word in _FIELD.findall(text))
                words.update(_VARIABLE.findall(text))
        makefile = (root / "Makefile").read_text()
        return cls(
            root,
            files,
            frozenset(str(p) for f in files for p in Path(f).parents),
            frozenset(words),
            frozenset(re.findall(r"^([a-z][a-z-]*):", makefile, re.MULTILINE)),
            _options(),
        )


def _options() -> dict[str, frozenset[str]]:
    options: dict[str, frozenset[str]] = {}
    for command in reference.commands():
        name = " ".join(word for word in command if not word.startswith("--"))
        found = frozenset(_OPTION.findall(reference.help_of(command)))
        options[name] = options.get(name, frozenset()) | found
    return options


def missing(text: str, facts: Facts) -> list[str]:
    """Return the citations on a page that do not exist, one line each."""
    faults = []
    for part, is_code in split_fences(text):
        if not is_code:
            for cited in _CODE.findall(part):
                faults += _missing_in_prose(cited, facts)
        for line in _lines(part, is_code):
            faults += _missing_in_command(line, facts)
    return faults


def missing_notes(root: Path, files: frozenset[str]) -> list[str]:
    """Return citations of titled notes that no source file contains."""
    texts = {f: (root / f).read_text() for f in files if f.endswith((".py", ".c", ".h", ".md"))}
    titles = {_one_line(title) for text in texts.values() for title in _NOTE_TITLE.findall(text)}
    return [
        f"{file}: no note titled {_one_line(title)!r}"
        for file, text in sorted(texts.items())
        if not file.startswith(("tools/", "tests/"))
        for title in _NOTE.findall(text)
        if _one_line(title) not in titles
    ]


def _one_line(title: str) -> str:
    return " ".join(title.split()).replace(" * ", " ").replace(" # ", " ")


def _missing_in_prose(cited: str, facts: Facts) -> Iterator[str]:
    cited = cited.strip()
    if _ROOTED.match(cited):
        path = cited.rstrip("/")
        if path not in facts.files and path not in facts.folders:
            yield f"no file {cited}"
    elif _SOURCE.match(cited):
        if not any(f == cited or f.endswith(f"/{cited}") for f in facts.files):
            yield f"no file that ends in {cited}"
    elif (match := _NAME.match(cited)) and not exists(match[0], facts.root):
        yield f"no name {match[0]}"
    words = _VARIABLE.findall(cited)
    if cited.startswith("--"):
        words += _OPTION.findall(cited)
    for word in words:
        if word not in facts.words and word not in _SCHEDULERS:
            yield f"no source has {word}"


def _missing_in_command(line: str, facts: Facts) -> Iterator[str]:
    for target in _TARGET.findall(line):
        if line.lstrip("$ `").startswith("make") and target not in facts.targets:
            yield f"no target: make {target}"
    match = _COMMAND.search(line)
    if match is None:
        return
    command = f"echelon {match['sub']}" if match["sub"] else "fr-analyze"
    known = facts.options.get(command)
    if known is None:
        yield f"no command: {command}"
        return
    rest = match["rest"]
    if command == "echelon run":
        rest = _SCRIPT.sub("", rest)
    for option in _OPTION.findall(rest):
        if option not in known:
            yield f"{command} has no option {option}"


def _lines(part: str, is_code: bool) -> Iterator[str]:
    """Yield the code in a part of a page: code lines, with continuations joined, and inline code.

    `is_code` means that the part is a fenced code block.
    """
    for line in part.replace("\\\n", " ").splitlines():
        if is_code or line.startswith("    "):
            yield re.split(r"\s{2,}#|\s#\s", line.strip())[0]
        yield from _CODE.findall(line)


@functools.cache
def exists(name: str, root: Path) -> bool:
    """Return whether a dotted name below `echelon` is defined, without importing anything."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        base = root.joinpath(*parts[:end])
        file = base / "__init__.py" if base.is_dir() else base.with_suffix(".py")
        if file.is_file():
            return _has(ast.parse(file.read_text()), parts[end:], root)
    return False


def _has(tree: ast.Module | ast.ClassDef, names: list[str], root: Path) -> bool:
    if not names:
        return True
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                if name == names[0]:
                    return True
            case ast.ClassDef(name=name) if name == names[0]:
                return len(names) == 1 or bool(node.bases) or _has(node, names[1:], root)
            case ast.ImportFrom() if node.module:
                for alias in node.names:
                    if (alias.asname or alias.name) == names[0]:
                        return exists(".".join([node.module, alias.name, *names[1:]]), root)
            case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name) if name == names[0]:
                return True
            case ast.Constant(value=value) if value == names[0]:
                return True  # a lazily imported name
    return False
