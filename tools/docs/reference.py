"""Generate the reference pages of the API and of the commands from the code."""

from __future__ import annotations

import ast
import contextlib
import io
import os
import re
from dataclasses import dataclass
from pathlib import Path

from echelon import cli

# the top-level documents that are pages of the site too
TOP_LEVEL = {
    "ARCHITECTURE.md": "architecture.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
}

# in the order of the navigation
PACKAGES = (
    "echelon.dist",
    "echelon.dist.mesh",
    "echelon.dist.fsdp",
    "echelon.dist.pipeline",
    "echelon.dist.parallel",
    "echelon.dist.checkpoint",
    "echelon.dist.resilient",
    "echelon.recorder",
    "echelon.store",
    "echelon.analysis",
    "echelon.tokens",
    "echelon.train.models",
    "echelon.train.optimizers",
    "echelon.train.schedules",
    "echelon.train.loss",
    "echelon.train.activations",
    "echelon.train.ema",
    "echelon.train.finite",
    "echelon.train.figures",
    "echelon.train.settings",
    "echelon.errors",
)
_INVOCATIONS = (
    ("echelon", "run"),
    ("echelon", "status"),
    ("echelon", "report"),
    ("echelon", "doctor"),
    ("echelon", "prepare"),
    ("echelon", "plot"),
    ("echelon", "plan"),
    ("echelon", "witness"),
    ("echelon", "store"),
    ("fr-analyze",),
    ("fr-analyze", "--attach"),
)


@dataclass(frozen=True)
class Package:
    """One page of the API reference."""

    module: str
    purpose: str
    names: tuple[tuple[str, str], ...]  # public name, path of its definition

    @property
    def page(self) -> str:
        """The page's path below docs/."""
        return f"reference/api/{self.module.removeprefix('echelon.')}.md"

    def markdown(self) -> str:
        """Return the page's text: the package's description, and its public names in order."""
        lines = [f"# {self.module}", "", self.purpose, ""]
        for name, home in self.names:
            lines += [f"::: {home}", "    options:", f"      heading: {self.module}.{name}"]
            lines += [f"      toc_label: {name}", ""]
        return "\n".join(lines)


def documented_packages(root: Path) -> list[Package]:
    """Return the packages that have a page, without importing them."""
    return [_package(root, module) for module in PACKAGES]


def generated_pages(root: Path) -> list[str]:
    """Return the paths, relative to docs/, of the pages that exist only on the site."""
    api = [package.page for package in documented_packages(root)]
    return [*api, "reference/commands.md", *TOP_LEVEL.values()]


def commands() -> list[tuple[str, ...]]:
    """Return every command that has its own `--help`."""
    return list(_INVOCATIONS)


def help_of(command: tuple[str, ...]) -> str:
    """Return a command's `--help` output, 96 columns wide.

    Raises:
        AssertionError: the command's exit code was not 0.
    """
    entry = cli.analyze if command[0] == "fr-analyze" else cli.main
    printed, code = io.StringIO(), None
    columns = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = "96"
    try:
        with contextlib.redirect_stdout(printed):
            code = entry([*command[1:], "--help"])
    except SystemExit as ended:
        code = ended.code
    finally:
        if columns is None:
            del os.environ["COLUMNS"]
        else:
            os.environ["COLUMNS"] = columns
    assert not code, f"{' '.join(command)} --help: {code}"
    return re.sub(r"\x1b\[[\d;]*m", "", printed.getvalue())


def commands_page() -> str:
    """Return the page of commands, which shows the `--help` output of each command."""
    lines = ["# Commands", "", "What each command prints for `--help`.", ""]
    for command in commands():
        lines += [f"## {' '.join(command)}", "", "```text", help_of(command).rstrip(), "```", ""]
    return "\n".join(lines)


def _package(root: Path, module: str) -> Package:
    path = _file_of(root, module)
    tree = ast.parse(path.read_text())
    purpose = ast.get_docstring(tree) or ""
    names = _public_names(tree)
    homes = _homes(tree, module)
    return Package(
        module,
        _as_markdown(purpose),
        tuple((name, _definition(root, homes.get(name, f"{module}.{name}"))) for name in names),
    )


def _as_markdown(docstring: str) -> str:
    """Convert a docstring to Markdown: lines indented by 2 or 3 spaces also become code."""
    return re.sub(r"(?m)^(?=[ ]{2,3}\S)", "    ", docstring)


def _file_of(root: Path, module: str) -> Path:
    base = root.joinpath(*module.split("."))
    return base / "__init__.py" if base.is_dir() else base.with_suffix(".py")


def _public_names(tree: ast.Module) -> list[str]:
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return list(ast.literal_eval(node.value))
    defined = (n.name for n in tree.body if isinstance(n, ast.ClassDef | ast.FunctionDef))
    return [name for name in defined if name[0] != "_"]


def _homes(tree: ast.Module, module: str) -> dict[str, str]:
    """Map each imported name to its origin, including lazily imported names."""
    homes = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                homes[alias.asname or alias.name] = f"{node.module}.{alias.name}"
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_HOMES":
            for name, file in ast.literal_eval(node.value).items():
                homes[name] = f"{module}.{file}.{name}"
    return homes


def _definition(root: Path, path: str) -> str:
    """Follow re-exports from `path` to the module that defines the name."""
    while True:
        module, _, name = path.rpartition(".")
        file = _file_of(root, module)
        if not file.exists():
            return path
        tree = ast.parse(file.read_text())
        found = _homes(tree, module).get(name)
        if found is None or found == path or _defines(tree, name):
            return path
        path = found


def _defines(tree: ast.Module, name: str) -> bool:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
            return True
    return False
