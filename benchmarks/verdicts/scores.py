"""Comparison of an analyzer's answers with the truth."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

SURE = frozenset({"certain", "likely"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """An analyzer's answer to a case.

    Attributes:
        cause: in the vocabulary of `docs/verdicts.md`; "" for nothing wrong.
        culprits: the ranks that it names.
        confidence: "certain", "likely", "possible"; "likely" for an analyzer without one.
        failed: why there is no answer, "" if there is one.
    """

    cause: str = ""
    culprits: tuple[int, ...] = ()
    confidence: str = "likely"
    failed: str = ""
    text: str = ""

    @property
    def is_alarm(self) -> bool:
        """Whether it reports that something is wrong."""
        return bool(self.cause) and not self.failed


@dataclass(frozen=True, slots=True)
class Mark:
    """One answer, judged."""

    truth: dict[str, Any]
    answer: Answer

    @property
    def is_healthy(self) -> bool:
        """Whether nothing is wrong in this case."""
        return bool(self.truth["healthy"])

    @property
    def counts(self) -> bool:
        """Whether the case is a decidable fault."""
        return not self.is_healthy and bool(self.truth["decidable"])

    @property
    def culprits_exact(self) -> bool:
        """Whether exactly an acceptable set of ranks is named."""
        named = sorted(self.answer.culprits)
        return self.answer.is_alarm and named in self.truth["acceptable_culprits"]

    @property
    def cause_acceptable(self) -> bool:
        """Whether the cause is one of those that the records allow."""
        return self.answer.is_alarm and self.answer.cause in self.truth["acceptable_causes"]

    @property
    def false_alarm(self) -> bool:
        """Whether a healthy job is reported to be at fault."""
        return self.is_healthy and self.answer.is_alarm

    @property
    def confidently_wrong(self) -> bool:
        """Whether a wrong answer has the confidence "likely" or "certain".

        Naming no rank is not wrong. In an undecidable case, a named rank must be among those that
        the truth allows.
        """
        if not self.answer.is_alarm or self.answer.confidence not in SURE:
            return False
        if self.is_healthy:
            return True
        if self.answer.culprits and not self.culprits_exact:
            return True
        return self.counts and not self.cause_acceptable

    @property
    def is_right(self) -> bool:
        """Whether the answer has no fault at all."""
        if self.is_healthy:
            return not self.answer.is_alarm and not self.answer.failed
        if not self.counts:
            return not self.confidently_wrong
        return self.culprits_exact and self.cause_acceptable


@dataclass(frozen=True, slots=True)
class Score:
    """The sums over many cases."""

    marks: Sequence[Mark]

    def _share(self, marks: Iterable[bool]) -> tuple[int, int]:
        found = list(marks)
        return sum(found), len(found)

    @property
    def culprits_exact(self) -> tuple[int, int]:
        """(right, of) over the decidable faults."""
        return self._share(one.culprits_exact for one in self.marks if one.counts)

    @property
    def cause_acceptable(self) -> tuple[int, int]:
        """(right, of) over the decidable faults."""
        return self._share(one.cause_acceptable for one in self.marks if one.counts)

    @property
    def confidently_wrong(self) -> tuple[int, int]:
        """(wrong, of) over all cases."""
        return self._share(one.confidently_wrong for one in self.marks)

    @property
    def false_alarms(self) -> tuple[int, int]:
        """(alarms, of) over the healthy jobs."""
        return self._share(one.false_alarm for one in self.marks if one.is_healthy)

    @property
    def failed(self) -> tuple[int, int]:
        """(no answer, of) over all cases."""
        return self._share(bool(one.answer.failed) for one in self.marks)

    def families(self) -> dict[str, Score]:
        """Return the score of each family."""
        found: dict[str, list[Mark]] = {}
        for one in self.marks:
            found.setdefault(str(one.truth["family"]), []).append(one)
        return {name: Score(marks) for name, marks in found.items()}
