"""Settings come back from TOML as they were, and mistakes are named."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import pytest

from echelon.train.settings import (
    build,
    differences,
    merged,
    names,
    override,
    parse_assignment,
    read_toml,
    to_dict,
    to_toml,
)


@dataclass(frozen=True, kw_only=True)
class Training:
    lr: float = field(default=1e-3, metadata={"above": 0})
    steps: int = field(default=10, metadata={"least": 1})
    shape: Literal["cosine", "wsd"] = "cosine"
    shard: bool = False


@dataclass(frozen=True, kw_only=True)
class Settings:
    name: str
    data: tuple[str, ...] = ()
    every: int | None = None
    training: Training = field(default_factory=Training)


def test_settings_return_from_the_file_as_they_were(tmp_path):
    settings = Settings(
        name='quo"te\\ \n \x7f \u2028 ä',
        data=("a:0.7", "b"),
        training=Training(lr=3e-7, shard=True),
    )
    (tmp_path / "run.toml").write_text(to_toml(settings), encoding="utf-8")
    assert build(Settings, read_toml(tmp_path / "run.toml")) == settings


def test_whole_numbers_are_numbers_too():
    assert build(Training, {"lr": 1}).lr == 1.0


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({}, "name is missing"),
        ({"name": "x", "training": {"lrr": 1.0}}, "unknown setting training.lrr; did you mean"),
        ({"name": "x", "zzz": 1}, "unknown setting zzz; use one of name, data, every, training"),
        ({"name": 7}, "name must be a string, got 7"),
        ({"name": "x", "data": "a"}, "data must be a list, got 'a'"),
        ({"name": "x", "every": True}, "every must be an integer, got True"),
        ({"name": "x", "training": 3}, "training must be a section, got 3"),
        ({"name": "x", "training": {"lr": "fast"}}, "training.lr must be a number, got 'fast'"),
        ({"name": "x", "training": {"lr": float("nan")}}, "must be a finite number"),
        ({"name": "x", "training": {"lr": 0.0}}, "training.lr must be above 0.*, got 0.0"),
        ({"name": "x", "training": {"steps": 0}}, "training.steps must be at least 1, got 0"),
        ({"name": "x", "training": {"steps": 1.5}}, "training.steps must be an integer, got 1.5"),
        ({"name": "x", "training": {"shape": "sine"}}, "must be one of cosine, wsd, got 'sine'"),
        ({"name": "x", "training": {"shard": 1}}, "training.shard must be true or false, got 1"),
    ],
)
def test_mistakes_are_named(values, complaint):
    with pytest.raises(ValueError, match=complaint):
        build(Settings, values)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("training.lr=3e-4", ("training.lr", 3e-4)),
        ("data=['a', 'b']", ("data", ["a", "b"])),
        ("training.shape=wsd", ("training.shape", "wsd")),
        ("name = a b", ("name", "a b")),
    ],
)
def test_an_assignment_is_a_name_and_a_value(text, expected):
    assert parse_assignment(text) == expected


@pytest.mark.parametrize("text", ["training.lr", "=3", ""])
def test_what_is_not_an_assignment_is_refused(text):
    with pytest.raises(ValueError, match="expected NAME=VALUE, got"):
        parse_assignment(text)


def test_a_value_is_not_a_section():
    with pytest.raises(ValueError, match=r"name\.x: name is not a section"):
        override({"name": "x"}, "name.x", 1)


def test_the_upper_values_win_and_nothing_is_changed():
    below = {"training": {"lr": 1.0, "steps": 2}}
    assert merged(below, {"training": {"lr": 3.0}}) == {"training": {"lr": 3.0, "steps": 2}}
    assert below == {"training": {"lr": 1.0, "steps": 2}}


def test_differences_are_named_with_both_values():
    one = Settings(name="a", training=Training(lr=0.1))
    two = Settings(name="a", every=5, training=Training(lr=0.2))
    assert differences(to_dict(one), to_dict(one)) == []
    assert sorted(differences(to_dict(one), to_dict(two))) == [
        "every unset before, 5 now",
        "training.lr 0.1 before, 0.2 now",
    ]


def test_a_file_that_is_not_toml_is_named(tmp_path):
    (tmp_path / "x.toml").write_text("= 3")
    with pytest.raises(ValueError, match=r"x\.toml is not valid TOML: .*line 1"):
        read_toml(tmp_path / "x.toml")


def test_all_names_are_known():
    assert names(Settings)[-1] == "training.shard"
