"""The open verdict benchmark: it is deterministic, and `fr-analyze` holds its bars on a sample."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.verdicts.analyzers import ask_echelon
from benchmarks.verdicts.cases import Case, plan, write_case
from benchmarks.verdicts.faults import FAMILIES
from benchmarks.verdicts.scores import Answer, Mark, Score


def sample() -> list[Case]:
    """Take one small case of each family."""
    small = [case for case in plan(8 * len(FAMILIES), "ci") if case.world_size <= 16]
    return [next(case for case in small if case.family is family) for family in FAMILIES]


@pytest.fixture(scope="module")
def score(tmp_path_factory: pytest.TempPathFactory) -> Score:
    folder = tmp_path_factory.mktemp("verdicts")
    cases = sample()
    truths = [write_case(case, folder / case.name) for case in cases]
    answers = ask_echelon([folder / case.name for case in cases])
    return Score([Mark(truth, answer) for truth, answer in zip(truths, answers, strict=True)])


def test_families_are_many_enough() -> None:
    assert len(FAMILIES) >= 25
    assert sum(family.name.startswith("healthy") for family in FAMILIES) >= 5


def test_the_sample_holds_the_bars(score: Score) -> None:
    wrong = [(mark.truth["case"], mark.answer) for mark in score.marks if not mark.is_right]
    exact, of = score.culprits_exact
    acceptable, _ = score.cause_acceptable
    assert exact >= 0.97 * of, wrong
    assert acceptable >= 0.97 * of, wrong
    assert score.confidently_wrong[0] == 0, wrong
    assert score.false_alarms[0] == 0, wrong
    assert score.failed[0] == 0, wrong


def test_texts_do_not_contradict_themselves(score: Score) -> None:
    for mark in score.marks:
        text = mark.answer.text
        if "the others" in text:
            assert len(mark.answer.culprits) < mark.truth["world_size"], text
        for count in re.findall(r"\ball (\d+) ranks entered", text):
            assert 2 <= int(count) <= mark.truth["world_size"], text


def test_a_seed_makes_the_same_bytes(tmp_path: Path) -> None:
    case = sample()[6]
    write_case(case, tmp_path / "a")
    write_case(case, tmp_path / "b")
    first = {path.name: path.read_bytes() for path in (tmp_path / "a").iterdir()}
    assert first == {path.name: path.read_bytes() for path in (tmp_path / "b").iterdir()}
    assert len(first) > case.world_size // 2


def test_a_confident_wrong_name_counts_and_an_open_one_does_not() -> None:
    truth = {
        "healthy": False, "decidable": True, "family": "host_hang",
        "acceptable_causes": ["host_hang"], "acceptable_culprits": [[3]],
    }  # fmt: skip
    wrong = Answer(cause="host_hang", culprits=(2,), confidence="likely")
    assert Mark(truth, wrong).confidently_wrong
    assert not Mark(truth, Answer(cause="host_hang", confidence="possible")).confidently_wrong
    assert Mark(truth, Answer(cause="host_hang", culprits=(3,))).is_right
    healthy = {"healthy": True, "decidable": True, "family": "healthy_end"}
    assert Mark(healthy, wrong).false_alarm
    assert Mark(healthy, Answer()).is_right


@pytest.mark.slow
def test_the_whole_table_holds_the_bars(tmp_path: Path) -> None:
    marks = []
    for case in plan(450, "table", 2):
        truth = write_case(case, tmp_path / case.name)
        marks.append(Mark(truth, ask_echelon([tmp_path / case.name])[0]))
    score = Score(marks)
    exact, of = score.culprits_exact
    assert exact >= 0.97 * of
    assert score.confidently_wrong[0] <= 0.005 * len(marks)
    assert score.false_alarms[0] == 0
