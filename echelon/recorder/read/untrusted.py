"""Build instances of record classes from the fields of untrusted files.

Every known field is checked against its declared type. Unknown fields are dropped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

from echelon.errors import DumpFormatError
from echelon.recorder.format.schema import FORMAT_MAJOR, FORMAT_MINOR, HostChild, HostThread, Socket

_T = TypeVar("_T")
_NESTED: dict[str, type[Any]] = {
    "tuple[Socket": Socket,
    "tuple[HostThread": HostThread,
    "tuple[HostChild": HostChild,
}


def check_version(path: Path, version: object) -> tuple[int, int]:
    """Check the version that a file states, and return it as (major, minor).

    Raises:
        DumpFormatError: `version` is malformed, or the major version differs from the reader's.
    """
    if (
        not isinstance(version, Sequence)
        or len(version) != 2
        or not all(isinstance(v, int) for v in version)
    ):
        raise DumpFormatError(f"{path}: the file does not state its format version", path=path)
    if version[0] != FORMAT_MAJOR:
        raise DumpFormatError(
            f"{path}: the file has format {version[0]}.{version[1]}, but this version of echelon "
            f"reads {FORMAT_MAJOR}.x (and writes {FORMAT_MAJOR}.{FORMAT_MINOR}). Use the version "
            "of echelon that wrote the file",
            path=path,
        )
    return version[0], version[1]


def build(path: Path, kind: type[_T], values: Mapping[str, Any]) -> _T:
    """Create an instance of a record class from untrusted fields, checking their types.

    Unknown fields are dropped.
    """
    known = {field.name: field for field in fields(kind)}  # type: ignore[arg-type]
    taken = {name: value for name, value in values.items() if name in known}
    for name, value in taken.items():
        if not _fits(str(known[name].type), value):
            raise DumpFormatError(
                f"{path}: field {name!r} has the invalid value {value!r:.100}", path=path
            )
        if isinstance(value, (list, tuple)):
            nested = _nested(str(known[name].type))
            taken[name] = tuple(build(path, nested, v) if nested else v for v in value)
    try:
        return kind(**taken)
    except TypeError as err:
        raise DumpFormatError(
            f"{path}: a record of type {kind.__name__} is incomplete", path=path
        ) from err


def _nested(annotation: str) -> type[Any] | None:
    return next((kind for start, kind in _NESTED.items() if annotation.startswith(start)), None)


def _fits(annotation: str, value: object) -> bool:
    plain: dict[str, tuple[type, ...]] = {
        "int": (int,),
        "str": (str,),
        "bool": (bool,),
        "float": (int, float),
    }
    base, _, optional = annotation.partition(" | ")
    if value is None:
        return optional == "None"
    if base in plain:
        return isinstance(value, plain[base]) and (base == "bool" or not isinstance(value, bool))
    if base.startswith("tuple["):
        kind = dict if _nested(base) else str
        return isinstance(value, (list, tuple)) and all(isinstance(v, kind) for v in value)
    if base == "Mapping[str, float]":
        return isinstance(value, dict) and all(_fits("float", v) for v in value.values())
    return isinstance(value, dict)
