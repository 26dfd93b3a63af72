"""Find errors that a program caught and survived, and remove the failed calls from the evidence.

A mismatch, a timeout or a lost peer ends its group, but not necessarily the program. If all members
caught the error and continued, the job ended later for another reason. The failed calls are then
removed, because they would otherwise look like the earliest fault.

An error counts as survived only if no rank is still inside the failed operation, if every member
continued (see `continued.py`), and if no rank ended because of the error. torch's flight recorder
does not record errors, so nothing is removed from its dumps.
"""

from __future__ import annotations

import re
import signal
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from echelon.analysis.evidence.errors.continued import Continuation
from echelon.analysis.evidence.model import Evidence, RankEvidence
from echelon.analysis.evidence.stacks.frames import last_traceback
from echelon.recorder.format.schema import State

_MISMATCH = re.compile(r"MismatchError\b|Detected mismatch between collectives")
_KINDS = {  # of errors that end a group and not the program
    "mismatch": _MISMATCH,
    "timeout": re.compile(r"CollectiveTimeoutError\b"),
    "lost peer": re.compile(r"PeerLostError\b"),
}
_ECHELONS = re.compile(r"^(?:echelon\.errors\.|(?:Collective|PeerLost|Store)\w*Error$)")
_GROUP = re.compile(r"\bin group '([^'\n]{1,200})'")
_HABIT = 2  # survived mismatches at one call site: a further one there is survived sooner
MAX_DESCRIBED = 2  # of the newest mismatches, `num_steps` is exact
_NUMBER = re.compile(r"#\d{1,9}$")  # of a group whose name and members had been used before
_CHAINED = re.compile(
    r"The above exception was the (direct cause) of|During handling of the above exception"
)
_MAX_COMPARED = 120  # characters of recorded errors
_SIGNALLED = 128  # exit codes from here on report a signal
# How a process ends by an uncaught exception: with code 1, or aborted by a library's threads.
_BY_EXCEPTION = frozenset({1, -signal.SIGABRT, 128 + signal.SIGABRT})


@dataclass(frozen=True, kw_only=True, slots=True)
class Survived:
    """An error that all members of a group caught and survived.

    `num_steps` is the number of later steps in which every member took part, or 0 if unknown.
    """

    group: int
    name: str
    kind: str  # of the error: "mismatch", "timeout" or "lost peer"
    operation: str
    sequence: int
    site: str
    num_steps: int
    is_group_over: bool
    errors: frozenset[str]  # as recorded, without their types
    other_errors: frozenset[str]  # of other mismatches of the job

    def is_named_by(self, type_name: str, message: str) -> bool:
        """Return whether an exception, given by its type and message, reports this error."""
        if not _KINDS[self.kind].search(f"{type_name}: {message}"):
            return False
        if _is_among(self.errors, message):
            return True
        named = _GROUP.findall(message)
        is_named = not named or _NUMBER.sub("", self.name) in named
        return is_named and not _is_among(self.other_errors, message)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Break:
    """The rows of evidence whose operations failed because of one error.

    `failed` maps each rank to the indices of these rows, in ascending order: [num_rows].
    """

    group: int
    failed: Mapping[int, npt.NDArray[np.int64]]
    is_group_over: bool

    def first(self) -> dict[int, int]:
        """Return, for each rank, the index of the row of its first failed operation."""
        return {rank: int(places[0]) for rank, places in self.failed.items()}

    def errors(self, evidence: Evidence) -> frozenset[str]:
        """Return the recorded error messages, without the names of the error types."""
        rows = (evidence.ranks[rank].rows[places] for rank, places in self.failed.items())
        numbers = {int(number) for own in rows for number in own["error"]}
        return frozenset(evidence.tables.texts[n].partition(": ")[2] for n in numbers)


def without_survived(evidence: Evidence) -> tuple[Evidence, tuple[Survived, ...]]:
    """Remove the errors that all members survived.

    Return the remaining evidence and the removed errors, oldest first.
    """
    breaks = [] if evidence.foreign else list(_breaks(evidence))
    if not breaks or _ended_alike(evidence):
        return evidence, ()
    found = _all_survived(evidence, breaks)
    if not found:
        return evidence, ()
    over = [one for one, _ in found]
    ranks = {
        rank: replace(facts, rows=facts.rows[~_is_over(facts, over)])
        for rank, facts in evidence.ranks.items()
    }
    return replace(evidence, ranks=ranks), tuple(seen for _, seen in reversed(found))


def _is_over(facts: RankEvidence, breaks: Sequence[_Break]) -> npt.NDArray[np.bool_]:
    """Return a mask of the rows that belong to errors that the job survived: [num_rows]."""
    rows = facts.rows
    over = np.zeros(len(rows), np.bool_)
    for one in breaks:
        over[one.failed.get(facts.rank, [])] = True
        if one.is_group_over:
            over |= (rows["group"] == one.group) & (rows["state"] != State.COMPLETED)
    return over


# ---- the mismatches on record ----


def _kind_of(error: str) -> str:
    """Return the kind of a recorded error, or "" if the kind is unknown."""
    return next((kind for kind, pattern in _KINDS.items() if pattern.search(error)), "")


def _breaks(evidence: Evidence) -> Iterator[_Break]:
    """Yield one error per failed group, or one per failed operation if the group was used again."""
    by_group: dict[int, dict[int, npt.NDArray[np.int64]]] = {}
    for rank, facts in evidence.ranks.items():
        failed = facts.rows["state"] == State.FAILED
        errors = np.unique(facts.rows["error"][failed]).tolist()
        told = [number for number in errors if _kind_of(evidence.tables.texts[number])]
        places = np.flatnonzero(failed & np.isin(facts.rows["error"], told))
        groups = facts.rows["group"][places]
        for group in np.unique(groups).tolist():
            by_group.setdefault(group, {})[rank] = places[groups == group]
    for group, failed_rows in by_group.items():
        whole = _Break(group=group, failed=failed_rows, is_group_over=True)
        if _is_used_again(evidence, whole):
            yield from _by_operation(evidence, whole)
        else:
            yield whole


def _is_used_again(evidence: Evidence, one: _Break) -> bool:
    """Return whether any rank completed a call in the group after that rank's first failed call."""
    for rank, index in one.first().items():
        later = evidence.ranks[rank].rows[index + 1 :]
        if bool(((later["group"] == one.group) & (later["state"] == State.COMPLETED)).any()):
            return True
    return False


def _by_operation(evidence: Evidence, whole: _Break) -> Iterator[_Break]:
    found: dict[int, dict[int, npt.NDArray[np.int64]]] = {}
    for rank, places in whole.failed.items():
        numbers = evidence.ranks[rank].rows["sequence"][places]
        for number in np.unique(numbers).tolist():
            found.setdefault(number, {})[rank] = places[numbers == number]
    for failed in found.values():
        yield _Break(group=whole.group, failed=failed, is_group_over=False)


# ---- whether they were survived ----


def _all_survived(evidence: Evidence, breaks: Sequence[_Break]) -> list[tuple[_Break, Survived]]:
    """Return the errors that all members survived, newest first."""
    errors = frozenset().union(*(one.errors(evidence) for one in breaks))
    ordered = sorted(breaks, key=lambda one: -int(_earliest_row(evidence, one)["created_ns"]))
    found: dict[int, Survived] = {}
    continued: dict[tuple[int, ...], int] = {}  # members -> steps at least, after a newer break
    for place, one in enumerate(ordered):
        members = evidence.groups[one.group].ranks
        num_steps = continued.get(members) if place >= MAX_DESCRIBED else None
        if num_steps is None:
            num_steps = _continuation(evidence, one).num_steps()
        seen = None if num_steps is None else _survived(evidence, one, errors, num_steps)
        if seen is not None:
            found[place] = seen
            continued[members] = seen.num_steps
    sites = Counter(seen.site for seen in found.values() if seen.site)
    for place, one in enumerate(ordered):
        site = evidence.site(_earliest_row(evidence, one))
        if (
            place not in found
            and sites[site] >= _HABIT
            and _continuation(evidence, one).has_begun()
        ):
            seen = _survived(evidence, one, errors, 0)
            found.update({place: seen} if seen is not None else {})
    return [(ordered[place], found[place]) for place in sorted(found)]


def _continuation(evidence: Evidence, one: _Break) -> Continuation:
    return Continuation(
        evidence=evidence,
        members=evidence.groups[one.group].ranks,
        failed=one.first(),
        over=one.group if one.is_group_over else -1,
    )


def _ended_alike(evidence: Evidence) -> bool:
    """Return whether all ranks exited with the same error code.

    The result is False if any rank raised an exception or did not complete its last call.
    """
    hosts = [facts.host for facts in evidence.ranks.values()]
    codes = {0 if host.alive or host.stopped_by_agent else host.exit_code for host in hosts}
    if len(codes) != 1 or not 0 < (codes.pop() or 0) < _SIGNALLED:
        return False
    return not any(_is_cut_off(evidence, facts) for facts in evidence.ranks.values())


def _is_cut_off(evidence: Evidence, facts: RankEvidence) -> bool:
    """Return whether a rank raised an exception or did not complete its last call.

    A last call that failed with a mismatch is regarded as completed.
    """
    if facts.last_words is not None:
        return True
    if not len(facts.rows) or facts.rows[-1]["state"] == State.COMPLETED:
        return False
    return not _MISMATCH.search(evidence.error(facts.rows[-1]))


def _survived(
    evidence: Evidence, one: _Break, errors: frozenset[str], num_steps: int
) -> Survived | None:
    """Describe an error, or return None if any rank did not survive it."""
    row, name = _earliest_row(evidence, one), evidence.groups[one.group].name
    sequence = int(row["sequence"])
    if any(_is_inside(facts, one, sequence) for facts in evidence.ranks.values()):
        return None
    seen = Survived(
        group=one.group,
        name=name,
        kind=_kind_of(evidence.error(row)),
        operation=evidence.call(row).operation,
        sequence=sequence if sequence >= 0 else int(row["p2p_sequence"]),
        site=evidence.site(row),
        num_steps=num_steps,
        is_group_over=one.is_group_over,
        errors=one.errors(evidence),
        other_errors=errors - one.errors(evidence),
    )
    return None if any(_ended_by(facts, seen) for facts in evidence.ranks.values()) else seen


def _is_inside(facts: RankEvidence, one: _Break, sequence: int) -> bool:
    """Return whether a rank has a pending call that the error affects.

    If the error ended the group, it affects all calls in the group. Otherwise, it affects only
    calls up to the failed operation.
    """
    rows = facts.rows
    inside = (rows["state"] == State.CREATED) | (rows["state"] == State.STARTED)
    inside &= rows["group"] == one.group
    if not one.is_group_over:
        inside &= rows["sequence"] <= sequence
    return bool(inside.any())


def _earliest_row(evidence: Evidence, one: _Break) -> Any:
    rows = [evidence.ranks[rank].rows[index] for rank, index in one.first().items()]
    return min(rows, key=lambda row: int(row["created_ns"]))


# ---- what the endings say ----


def _ended_by(facts: RankEvidence, seen: Survived) -> bool:
    """Return whether the records show that the error ended a rank or one of its threads."""
    for words in (facts.last_words, facts.thread_words):
        if words is not None and _names(words.type, words.message, words.traceback, seen):
            return True
    if facts.last_words is not None:
        return False
    texts = [facts.host.error_file]
    if facts.host.exit_code in _BY_EXCEPTION:  # with another code, the traceback was only printed
        texts.append(facts.host.stderr_tail)
    found = [raised for text in texts if (raised := last_traceback(text)) is not None]
    return any(_names(raised.type, raised.message, "", seen) for raised in found)


def _names(type_name: str, message: str, traceback: str, seen: Survived) -> bool:
    """Return whether the exception that ended a rank or thread refers to the error `seen`."""
    if seen.is_named_by(type_name, message):
        return True
    # Echelon's other errors concern other groups; what they were raised from is their own matter.
    return not _ECHELONS.match(type_name) and _was_raised_from(traceback, seen)


def _is_among(errors: Iterable[str], message: str) -> bool:
    """Return whether an exception's message contains the start of any recorded error's text."""
    return any(error and error[:_MAX_COMPARED] in message for error in errors)


def _was_raised_from(traceback: str, seen: Survived) -> bool:
    """Return whether an exception is chained to the error that a rank survived.

    If later steps prove that the program continued, only chaining by `raise ... from` counts.
    """
    told = list(_KINDS[seen.kind].finditer(traceback))
    place = told[-1].end() if told else -1
    link = _CHAINED.search(traceback, place) if place >= 0 else None
    return link is not None and (seen.num_steps == 0 or link[1] is not None)
