"""List the public API: every public name of every package, with its signature.

    python tools/public_api.py             # prints the list
    python tools/public_api.py --write     # writes tests/data/public_api.txt, which a test checks

A module's public names are the names in its `__all__`. Without `__all__`, they are the names that
the module defines and that do not start with an underscore. For a class, the list contains the
constructor and the members that echelon defines: methods, properties, enum members and data class
fields.
"""

from __future__ import annotations

import argparse
import enum
import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

LISTED = Path(__file__).resolve().parent.parent / "tests" / "data" / "public_api.txt"
MODULES = (
    "echelon",
    "echelon.analysis",
    "echelon.dist",
    "echelon.dist.checkpoint",
    "echelon.dist.fsdp",
    "echelon.dist.mesh",
    "echelon.dist.parallel",
    "echelon.dist.pipeline",
    "echelon.dist.resilient",
    "echelon.errors",
    "echelon.recorder",
    "echelon.store",
    "echelon.tokens",
    "echelon.train.activations",
    "echelon.train.ema",
    "echelon.train.figures",
    "echelon.train.finite",
    "echelon.train.loss",
    "echelon.train.models",
    "echelon.train.optimizers",
    "echelon.train.schedules",
    "echelon.train.settings",
)


def public_names(module: ModuleType) -> list[str]:
    """Return a module's public names, sorted."""
    if hasattr(module, "__all__"):
        return sorted(module.__all__)
    own = [name for name, value in vars(module).items() if _home(value) == module.__name__]
    return sorted(name for name in own if not name.startswith("_"))


def surface() -> str:
    """Return the public API as text, with one name per line in a fixed order."""
    lines = []
    for path in MODULES:
        module = importlib.import_module(path)
        for name in public_names(module):
            lines += _described(f"{path}.{name}", getattr(module, name))
    return "\n".join(lines) + "\n"


def _described(path: str, value: Any) -> Iterator[str]:
    if isinstance(value, ModuleType):
        yield f"{path}: module"
    elif inspect.isclass(value):
        is_called = not issubclass(value, enum.Enum) and not getattr(value, "_is_protocol", False)
        yield f"{path}{_signature(value)}" if is_called else path
        for name, member in sorted(_members(value).items()):
            yield from _member(f"{path}.{name}", member)
    elif callable(value):
        yield f"{path}{_signature(value)}"
    else:
        yield f"{path} = {value!r}"


def _members(kind: type) -> dict[str, Any]:
    """Return the public attributes that a class or echelon's base classes define, keyed by name."""
    own = [base for base in reversed(kind.__mro__) if base.__module__.startswith("echelon")]
    found: dict[str, Any] = {}
    for base in own:
        found.update(dict.fromkeys(vars(base).get("__annotations__", {})))
        found.update(vars(base))
    return {name: value for name, value in found.items() if not name.startswith("_")}


def _member(path: str, member: Any) -> Iterator[str]:
    if isinstance(member, property):
        settable = " (can be set)" if member.fset else ""
        returned = inspect.signature(member.fget).return_annotation if member.fget else ""
        yield f"{path}: {returned}{settable}"
    elif isinstance(member, enum.Enum):
        yield f"{path} = {member.value!r}"
    elif isinstance(member, (staticmethod, classmethod)):
        yield f"{path}{_signature(member.__func__)} [{type(member).__name__}]"
    elif inspect.isfunction(member):
        yield f"{path}{_signature(member)}"
    else:
        yield path


class _Unquoted(str):
    """An annotation from a postponed evaluation, whose `repr` does not have quotes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def _signature(value: Any) -> str:
    try:
        found = inspect.signature(value)
    except (TypeError, ValueError):  # written in C
        return ""
    parameters = [
        one.replace(annotation=_unquoted(one.annotation)) for one in found.parameters.values()
    ]
    returned = _unquoted(found.return_annotation)
    return str(found.replace(parameters=parameters, return_annotation=returned))


def _unquoted(annotation: Any) -> Any:
    return _Unquoted(annotation) if isinstance(annotation, str) else annotation


def _home(value: Any) -> str | None:
    return value.__module__ if inspect.isclass(value) or inspect.isfunction(value) else None


def main() -> None:
    """Print the list, or write it to the file that the test reads."""
    parser = argparse.ArgumentParser(description="List every public name with its signature.")
    parser.add_argument("--write", action="store_true", help=f"write {LISTED.name}")
    if parser.parse_args().write:
        LISTED.write_text(surface())
    else:
        print(surface(), end="")


if __name__ == "__main__":
    main()
