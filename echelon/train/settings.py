"""Read typed settings (frozen dataclasses) from TOML, and override, compare and write them.

    [training]
    lr = 3e-4

A section is a dataclass. A field holds a number, a string, a boolean, a choice (`Literal`), a tuple
of these, or an optional value. To set None, omit the field. Unknown names and values of the wrong
type are rejected. For an unknown name, the error message suggests the nearest known name.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import sys
import types
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

T = TypeVar("T")


def read_toml(path: str | Path) -> dict[str, Any]:
    r"""Read a settings file into nested dicts.

    Raises:
        ValueError: the file is not valid TOML; the error message names the file and the line.
        OSError: the file cannot be read.

    Example:
        >>> _ = Path("gpt.toml").write_text("[training]\nlr = 0.1\n")
        >>> read_toml("gpt.toml")
        {'training': {'lr': 0.1}}
    """
    text = Path(path).read_bytes()
    try:
        values: dict[str, Any] = tomllib.loads(text.decode("utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid TOML: {error}") from error
    return values


def parse_assignment(text: str) -> tuple[str, Any]:
    """Split an assignment such as `training.lr=3e-4` into a dotted name and a value.

    The value is parsed as TOML. A value that is not valid TOML is returned as a string.

    Raises:
        ValueError: the text has no name or no `=`.

    Example:
        >>> parse_assignment("training.lr=3e-4"), parse_assignment("model.norm=rms")
        (('training.lr', 0.0003), ('model.norm', 'rms'))
    """
    name, equals, value = text.partition("=")
    if not equals or not name.strip():
        raise ValueError(f"expected NAME=VALUE, got {text!r}")
    try:
        return name.strip(), tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return name.strip(), value.strip()


def override(values: dict[str, Any], name: str, value: Any) -> None:
    """Set the value at a dotted name in nested dicts, in place; create missing sections.

    Raises:
        ValueError: a parent in the name is a value, not a section.

    Example:
        >>> values = {"training": {"lr": 0.1}}
        >>> override(values, "training.lr", 0.2)
        >>> values
        {'training': {'lr': 0.2}}
    """
    *sections, last = name.split(".")
    for section in sections:
        values = values.setdefault(section, {})
        if not isinstance(values, dict):
            raise ValueError(f"{name}: {section} is not a section")
    values[last] = value


def merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of `below` in which the values of `above` take precedence, section by section.

    Example:
        >>> merged({"training": {"lr": 0.1, "steps": 9}}, {"training": {"lr": 0.2}})
        {'training': {'lr': 0.2, 'steps': 9}}
    """
    result = dict(below)
    for name, value in above.items():
        old = result.get(name)
        is_section = isinstance(old, Mapping) and isinstance(value, Mapping)
        result[name] = merged(old, value) if is_section else value  # type: ignore[arg-type]
    return result


def build(kind: type[T], values: Mapping[str, Any]) -> T:
    """Build a dataclass from nested dicts.

    A field's metadata can limit a number: `least` is an inclusive lower bound, and `above` is an
    exclusive lower bound.

    Raises:
        ValueError: a name is unknown, or a value is missing, invalid or out of range.

    Example:
        >>> build(Cosine, {"num_steps": 100, "floor": 0.0})
        Cosine(num_steps=100, num_warmup=0, floor=0.0)
    """
    return _section(kind, values, "")


def to_dict(settings: Any) -> dict[str, Any]:
    """Return settings as nested dicts of plain values; fields with the value None are omitted.

    Example:
        >>> to_dict(Cosine(num_steps=100))
        {'num_steps': 100, 'num_warmup': 0, 'floor': 0.1}
    """
    result: dict[str, Any] = {}
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if dataclasses.is_dataclass(value):
            result[field.name] = to_dict(value)
        elif value is not None:
            result[field.name] = list(value) if isinstance(value, tuple) else value
    return result


def to_toml(settings: Any) -> str:
    """Return the settings as TOML text, which `read_toml` can read from a file.

    Example:
        >>> print(to_toml(Cosine(num_steps=100)), end="")
        num_steps = 100
        num_warmup = 0
        floor = 0.1
    """
    return "\n".join(_table(to_dict(settings), "")).strip() + "\n"


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return one line of text per difference between two results of `to_dict`.

    Example:
        >>> differences({"training": {"lr": 0.1}}, {"training": {"lr": 0.2}})
        ['training.lr 0.1 before, 0.2 now']
    """
    old, new = dict(_flat(before, "")), dict(_flat(now, ""))
    return [
        f"{name} {_shown(old.get(name))} before, {_shown(new.get(name))} now"
        for name in dict.fromkeys((*old, *new))
        if old.get(name) != new.get(name)
    ]


def names(kind: type, prefix: str = "") -> list[str]:
    """Return the dotted names of all fields of a settings dataclass.

    Example:
        >>> names(Cosine)
        ['num_steps', 'num_warmup', 'floor']
    """
    found = []
    hints = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        hint = hints[field.name]
        is_section = dataclasses.is_dataclass(hint)
        name = prefix + field.name
        found += names(hint, f"{name}.") if is_section else [name]
    return found


def _section(kind: type[T], values: Mapping[str, Any], prefix: str) -> T:
    if not isinstance(values, Mapping):
        raise ValueError(f"{prefix.rstrip('.')} must be a section, got {values!r}")
    fields: dict[str, Any] = {field.name: field for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    hints = typing.get_type_hints(kind)
    made: dict[str, Any] = {}
    for name, value in values.items():
        if name not in fields:
            raise ValueError(f"unknown setting {prefix}{name}{_nearest(name, fields, prefix)}")
        hint = hints[name]
        if dataclasses.is_dataclass(hint):
            made[name] = _section(hint, value, f"{prefix}{name}.")  # type: ignore[arg-type]
        else:
            made[name] = _value(hint, value, f"{prefix}{name}")
            _require_range(made[name], fields[name].metadata, f"{prefix}{name}")
    missing = [name for name, field in fields.items() if name not in made and _is_required(field)]
    if missing:
        raise ValueError(f"{prefix}{missing[0]} is missing")
    return kind(**made)


def _nearest(name: str, fields: Mapping[str, Any], prefix: str) -> str:
    near = difflib.get_close_matches(name, fields, n=1)
    if near:
        return f"; did you mean {prefix}{near[0]}?"
    return f"; use one of {', '.join(fields)}"


def _is_required(field: dataclasses.Field[Any]) -> bool:
    none = dataclasses.MISSING
    return field.default is none and field.default_factory is none


def _value(hint: Any, value: Any, name: str) -> Any:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        if value is None:
            return None
        return _value(next(a for a in arguments if a is not types.NoneType), value, name)
    if origin is typing.Literal:
        if value not in arguments:
            raise ValueError(
                f"{name} must be one of {', '.join(map(str, arguments))}, got {value!r}"
            )
        return value
    if origin is tuple:
        if not isinstance(value, (list, tuple)):
            raise ValueError(f"{name} must be a list, got {value!r}")
        return tuple(_value(arguments[0], item, name) for item in value)
    return _plain(hint, value, name)


def _plain(hint: type, value: Any, name: str) -> Any:
    kinds = {bool: "true or false", int: "an integer", float: "a number", str: "a string"}
    is_bool = isinstance(value, bool)
    if hint is float and isinstance(value, (int, float)) and not is_bool:
        if not math.isfinite(value):
            raise ValueError(f"{name} must be a finite number, got {value}")
        return float(value)
    if isinstance(value, hint) and (hint is bool or not is_bool):
        return value
    raise ValueError(f"{name} must be {kinds.get(hint, hint.__name__)}, got {value!r}")


def _require_range(value: Any, limits: Mapping[str, Any], name: str) -> None:
    if not isinstance(value, (int, float)):
        return
    if "least" in limits and value < limits["least"]:
        raise ValueError(f"{name} must be at least {limits['least']}, got {value}")
    if "above" in limits and value <= limits["above"]:
        raise ValueError(f"{name} must be above {limits['above']}, got {value}")


def _table(values: Mapping[str, Any], prefix: str) -> Iterator[str]:
    for name, value in values.items():
        if not isinstance(value, Mapping):
            yield f"{name} = {_literal(value)}"
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield f"\n[{prefix}{name}]"
            yield from _table(value, f"{prefix}{name}.")


def _literal(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_literal, value))}]"
    if isinstance(value, str):  # JSON escapes the same characters as TOML, except DEL
        return json.dumps(value).replace("\x7f", "\\u007f")
    return repr(value)


def _flat(values: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _shown(value: Any) -> str:
    return "unset" if value is None else _literal(value)
