"""Compare an analyzer's answers with the truth."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

SURE = frozenset({"certain", "likely"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """An analyzer's answer to a case.

    Attributes:
        cause: a cause as named in `docs/verdicts.md`; "" if nothing is wrong.
        culprits: the ranks that it names.
        confidence: "certain", "likely" or "possible"; "likely" if the analyzer reports none.
        failed: why the analyzer gave no answer, or "" if it gave one.
    """

    cause: str = ""
    culprits: tuple[int, ...] = ()
    confidence: str = "likely"
    failed: str = ""
    text: str = ""

    @property
    def is_alarm(self) -> bool:
        """True if the answer reports a fault."""
        return bool(self.cause) and not self.failed


@dataclass(frozen=True, slots=True)
class Mark:
    """A judged answer."""

    truth: dict[str, Any]
    answer: Answer

    @property
    def is_healthy(self) -> bool:
        """True if the case has no fault."""
        return bool(self.truth["healthy"])

    @property
    def counts(self) -> bool:
        """True if the case is a decidable fault."""
        return not self.is_healthy and bool(self.truth["decidable"])

    @property
    def culprits_exact(self) -> bool:
        """True if the named ranks are exactly one of the acceptable sets."""
        named = sorted(self.answer.culprits)
        return self.answer.is_alarm and named in self.truth["acceptable_culprits"]

    @property
    def cause_acceptable(self) -> bool:
        """True if the cause is one of the acceptable causes."""
        return self.answer.is_alarm and self.answer.cause in self.truth["acceptable_causes"]

    @property
    def false_alarm(self) -> bool:
        """True if the answer reports a fault in a healthy job."""
        return self.is_healthy and self.answer.is_alarm

    @property
    def confidently_wrong(self) -> bool:
        """True if a wrong answer has the confidence "likely" or "certain".

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
        """True if the answer is right in every respect."""
        if self.is_healthy:
            return not self.answer.is_alarm and not self.answer.failed
        if not self.counts:
            return not self.confidently_wrong
        return self.culprits_exact and self.cause_acceptable


@dataclass(frozen=True, slots=True)
class Score:
    """The totals over many cases."""

    marks: Sequence[Mark]

    def _share(self, marks: Iterable[bool]) -> tuple[int, int]:
        found = list(marks)
        return sum(found), len(found)

    @property
    def culprits_exact(self) -> tuple[int, int]:
        """(exact culprit sets, cases) over the decidable faults."""
        return self._share(one.culprits_exact for one in self.marks if one.counts)

    @property
    def cause_acceptable(self) -> tuple[int, int]:
        """(acceptable causes, cases) over the decidable faults."""
        return self._share(one.cause_acceptable for one in self.marks if one.counts)

    @property
    def confidently_wrong(self) -> tuple[int, int]:
        """(confidently wrong answers, cases) over all cases."""
        return self._share(one.confidently_wrong for one in self.marks)

    @property
    def false_alarms(self) -> tuple[int, int]:
        """(false alarms, cases) over the healthy jobs."""
        return self._share(one.false_alarm for one in self.marks if one.is_healthy)

    @property
    def failed(self) -> tuple[int, int]:
        """(missing answers, cases) over all cases."""
        return self._share(bool(one.answer.failed) for one in self.marks)

    def families(self) -> dict[str, Score]:
        """Return the score of each family."""
        found: dict[str, list[Mark]] = {}
        for one in self.marks:
            found.setdefault(str(one.truth["family"]), []).append(one)
        return {name: Score(marks) for name, marks in found.items()}
