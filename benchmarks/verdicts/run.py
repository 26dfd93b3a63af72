"""Write the cases, run the analyzers, print the table.

    python -m benchmarks.verdicts.run                          # 450 cases and 6 of 1,024 ranks
    python -m benchmarks.verdicts.run --only host_hang,network --wrong
    python -m benchmarks.verdicts.run --write FOLDER           # only write the cases
    python -m benchmarks.verdicts.run --answers FILE           # score another analyzer's answers

The seed "develop" is for work on an analyzer; the table is made with a different seed. `--answers`
takes a JSON object that maps each case name to {"cause", "culprit_ranks", "confidence"}, or to null
for no alarm.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.verdicts.analyzers import ANALYZERS
from benchmarks.verdicts.cases import Case, plan, write_case
from benchmarks.verdicts.faults import FAMILIES
from benchmarks.verdicts.scores import Answer, Mark, Score

_CHUNK = 15


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return 1 if echelon misses a required score."""
    options = _options(arguments)
    cases = list(_chosen(options))
    if options.write is not None:
        for case in cases:
            write_case(case, options.write / case.name)
        return 0
    names = [name for name in options.analyzers.split(",") if name in ANALYZERS]
    marks: dict[str, list[Mark]] = {name: [] for name in names}
    given = json.loads(options.answers.read_text()) if options.answers else None
    if given is not None:
        marks = {"given": []}
    chunks = [cases[at : at + _CHUNK] for at in range(0, len(cases), _CHUNK)]
    with ProcessPoolExecutor(options.jobs) as pool:
        for found in pool.map(score_chunk, chunks, [names] * len(chunks), [given] * len(chunks)):
            for name, some in found.items():
                marks[name] += some
    scores = {name: Score(found) for name, found in marks.items()}
    print_table(scores)
    if options.families or options.wrong:
        print_families(scores)
    if options.wrong:
        for name, score in scores.items():
            print_wrong(name, score)
    return 0 if all(passes(score) for name, score in scores.items() if name != "torch") else 1


def score_chunk(cases: list[Case], names: list[str], given: Any) -> dict[str, list[Mark]]:
    """Write a chunk of cases, run the analyzers and judge their answers."""
    folder = Path(tempfile.mkdtemp(prefix="verdicts_"))
    try:
        truths = [write_case(case, folder / case.name) for case in cases]
        folders = [folder / case.name for case in cases]
        if given is not None:
            answers = {"given": [_given(given, case.name) for case in cases]}
        else:
            answers = {name: ANALYZERS[name](folders) for name in names}
    finally:
        shutil.rmtree(folder)
    return {
        name: [Mark(truth, answer) for truth, answer in zip(truths, found, strict=True)]
        for name, found in answers.items()
    }


def _given(given: Any, name: str) -> Answer:
    if name not in given:
        return Answer(failed="no answer")
    one = given[name]
    if one is None:
        return Answer()
    return Answer(
        cause=str(one["cause"]),
        culprits=tuple(one["culprit_ranks"]),
        confidence=str(one.get("confidence", "likely")),
    )


def passes(score: Score) -> bool:
    """Return whether all required scores are met: 97 %, 97 %, 0.5 %, and no false alarms."""
    exact, acceptable = _rate(score.culprits_exact), _rate(score.cause_acceptable)
    wrong = _rate(score.confidently_wrong)
    alarms, _ = score.false_alarms
    return exact >= 0.97 and acceptable >= 0.97 and wrong <= 0.005 and not alarms


def _rate(share: tuple[int, int]) -> float:
    return share[0] / share[1] if share[1] else 0.0


def _shown(share: tuple[int, int]) -> str:
    return f"{share[0]} of {share[1]} ({100 * _rate(share):.1f} %)" if share[1] else "-"


def print_table(scores: dict[str, Score]) -> None:
    """Print the table, with one line per measure."""
    print("| | " + " | ".join(scores) + " |")
    print("|---|" + "---|" * len(scores))
    for label, name in (
        ("culprits exact", "culprits_exact"),
        ("cause acceptable", "cause_acceptable"),
        ("confidently wrong", "confidently_wrong"),
        ("alarms on healthy jobs", "false_alarms"),
        ("no answer", "failed"),
    ):
        print(
            f"| {label} | " + " | ".join(_shown(getattr(s, name)) for s in scores.values()) + " |"
        )


def print_families(scores: dict[str, Score]) -> None:
    """Print the number of right answers in each family."""
    print("\n| family | " + " | ".join(scores) + " |\n|---|" + "---|" * len(scores))
    by_family = {name: score.families() for name, score in scores.items()}
    for family in next(iter(by_family.values())):
        row = []
        for families in by_family.values():
            marks = families[family].marks
            row.append(f"{sum(one.is_right for one in marks)} of {len(marks)}")
        print(f"| {family} | " + " | ".join(row) + " |")


def print_wrong(name: str, score: Score) -> None:
    """Print each case with a wrong answer."""
    for one in score.marks:
        if one.is_right:
            continue
        answer, truth = one.answer, one.truth
        flag = "!" if one.confidently_wrong else " "
        print(
            f"{flag} {name} {truth['case']}: truth {truth['cause']} {truth['culprit_ranks'][:9]}"
            f"{'' if truth['decidable'] else ' (undecidable)'}, said {answer.cause or 'nothing'}"
            f" {list(answer.culprits)[:9]} {answer.confidence} {answer.failed}\n"
            f"      {answer.text[:170]}\n      {truth['dumps']}"
        )


def _chosen(options: argparse.Namespace) -> Iterator[Case]:
    only = set(options.only.split(",")) if options.only else {one.name for one in FAMILIES}
    numbers = {int(one) for one in options.numbers.split(",")} if options.numbers else None
    for case in plan(options.cases, options.seed, options.large):
        if case.family.name in only and (numbers is None or case.number in numbers):
            yield case


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else "")
    parser.add_argument("--cases", type=int, default=450)
    parser.add_argument("--large", type=int, default=6, help="cases of 1,024 ranks")
    parser.add_argument("--seed", default="table")
    parser.add_argument("--only", default="", metavar="FAMILY,...")
    parser.add_argument("--numbers", default="", metavar="N,...")
    parser.add_argument("--analyzers", default="fr-analyze,torch")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--families", action="store_true")
    parser.add_argument("--wrong", action="store_true")
    parser.add_argument("--write", type=Path, default=None, metavar="FOLDER")
    parser.add_argument("--answers", type=Path, default=None, metavar="FILE")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
