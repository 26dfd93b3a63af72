"""Collect hypotheses about the root finding, and choose among them.

Each rule proposes what it detects. A proposal explains the disturbed ranks that directly or
indirectly wait for its culprits, and can itself be explained by another proposal. The root is the
unexplained proposal that explains the most ranks. If two proposals explain the same number of
ranks, the rule closer to the cause wins. For example, a slip explains a mismatch, and a mismatch
explains endings. If the root leaves disturbed ranks unexplained, further roots are chosen for them.

[Note: certainty of an observation, certainty of a choice] A rule can be certain of its observation
while the choice of the root remains uncertain. For example, a rank was certainly killed, but
another failure might have caused the kill. This module lowers the confidence if a rival proposal
explains the same number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from echelon.analysis.evidence.picture import Picture
from echelon.analysis.finding import Alternative, Cause, Confidence, Finding, Scope, rank_list

Rule = Callable[[Picture], list[Finding]]
_WEAK = 0.75  # of a record: how much a rank without a record counts against one that shows a fault
_ORDER = (Confidence.POSSIBLE, Confidence.LIKELY, Confidence.CERTAIN)
_MAX_ALTERNATIVES = 3
_SELF_EVIDENT = frozenset(
    {
        Cause.OP_MISMATCH,
        Cause.SHAPE_MISMATCH,
        Cause.DTYPE_MISMATCH,
        Cause.REDUCE_OP_MISMATCH,
        Cause.ROOT_MISMATCH,
        Cause.SPLIT_MISMATCH,
        Cause.SKIPPED_COLLECTIVE,
    }
)
_MAX_MERGED = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Hypothesis:
    """A proposed finding, with the ranks that it explains and the priority of its rule."""

    finding: Finding
    explains: frozenset[int]
    place: int  # of its rule: the nearer to a cause, the lower
    is_weak: bool  # it rests on records that are missing

    @property
    def score(self) -> float:
        """The number of ranks that the hypothesis explains, reduced if no culprit has a record."""
        return len(self.explains) * (_WEAK if self.is_weak else 1.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """The findings that were chosen as root causes, and the remaining hypotheses."""

    roots: tuple[Finding, ...]
    rest: tuple[Hypothesis, ...]
    place: int = -1  # of the root's rule


def propose(picture: Picture, rules: Sequence[Rule]) -> list[Hypothesis]:
    """Run all rules, and collect their hypotheses."""
    return [
        Hypothesis(
            finding=finding,
            explains=explained(picture, finding),
            place=place,
            is_weak=_is_weak(picture, finding),
        )
        for place, rule in enumerate(rules)
        for finding in rule(picture)
        if not finding.info
    ]


def explained(picture: Picture, finding: Finding) -> frozenset[int]:
    """Return the ranks in `picture.disturbed` that a finding explains."""
    start = set(finding.culprit_ranks)
    if finding.scope is Scope.GROUP:
        start.update(_members_in(picture, finding))
    if finding.scope is Scope.FALLOUT:
        start.update(finding.fallout_ranks)
    reached = start | set(picture.graph.fallout(start))
    if finding.scope is Scope.SHARED:
        reached |= picture.dragged_along(start)
    waiting = picture.graph.waiting
    # Ranks that ended and waited nowhere: any cause may have led to that.
    return frozenset((reached & picture.disturbed) | (picture.disturbed - waiting))


def _members_in(picture: Picture, finding: Finding) -> Iterable[int]:
    """Return the ranks waiting in the finding's operation or in a later operation of its group."""
    number = finding.sequence
    for wait in picture.graph.waits:
        if wait.group == finding.group and (number is None or wait.sequence >= number):
            yield from wait.waiting


def _is_weak(picture: Picture, finding: Finding) -> bool:
    missing = set(picture.evidence.missing) - set(picture.evidence.incident.absent)
    return bool(finding.culprit_ranks) and missing.issuperset(finding.culprit_ranks)


def choose(picture: Picture, hypotheses: Sequence[Hypothesis]) -> Choice:
    """Choose the root hypothesis, and further ones for ranks that the first does not explain.

    The confidence in the root hypothesis is lowered if a rival hypothesis explains the same number
    of ranks.
    """
    if not hypotheses:
        return Choice(roots=(), rest=())
    ordered = sorted(hypotheses, key=lambda one: (-one.score, one.place))
    root = ordered[0]
    taken = [root]
    left = picture.disturbed - root.explains - set(root.finding.culprit_ranks)
    for other in ordered[1:]:
        if other.explains & left and not _is_same(other, taken):
            taken.append(other)
            left -= other.explains
    rivals = [
        one for one in ordered if one not in taken and not _is_same(one, taken) and one.explains
    ]
    first = _judged(picture, _merged(root, taken), rivals)
    beside = tuple(one.finding for one in taken[1:] if not _is_alike(root, one))
    rest = tuple(one for one in ordered if one not in taken)
    return Choice(roots=(first, *beside), rest=rest, place=root.place)


def _is_alike(root: Hypothesis, other: Hypothesis) -> bool:
    """Return whether two root hypotheses can be reported as a single finding."""
    if root.finding.scope is not Scope.CULPRITS:
        return False
    return other.place == root.place and other.finding.cause is root.finding.cause


def _merged(root: Hypothesis, taken: Sequence[Hypothesis]) -> Hypothesis:
    """Merge the root hypothesis with all chosen hypotheses that have the same rule and cause.

    All evidence and up to `_MAX_MERGED` summaries are retained.
    """
    alike = [one for one in taken if one is root or _is_alike(root, one)]
    if len(alike) == 1:
        return root
    findings = [one.finding for one in alike]
    ranks = tuple(sorted({rank for one in findings for rank in one.culprit_ranks}))
    merged = findings[0].changed(
        culprit_ranks=ranks,
        confidence=min((one.confidence for one in findings), key=_ORDER.index),
        summary="; independently, ".join(one.summary for one in findings[:_MAX_MERGED]),
        evidence=tuple(line for one in findings for line in one.evidence),
        fallout_ranks=tuple(
            sorted({rank for one in findings for rank in one.fallout_ranks} - set(ranks))
        ),
        would_settle=tuple(dict.fromkeys(line for one in findings for line in one.would_settle)),
    )
    explains = frozenset().union(*(one.explains for one in alike))
    return replace(root, finding=merged, explains=explains)


def _is_same(one: Hypothesis, taken: Sequence[Hypothesis]) -> bool:
    """Return whether the hypotheses chosen so far already name all culprits of this hypothesis."""
    named = {rank for other in taken for rank in other.finding.culprit_ranks}
    ranks = set(one.finding.culprit_ranks)
    return bool(ranks) and ranks <= named


def _judged(picture: Picture, root: Hypothesis, rivals: Sequence[Hypothesis]) -> Finding:
    """Add the rival hypotheses to the root's finding, and lower its confidence if necessary."""
    finding = _as_sure_as_seen(picture, root.finding)
    alternatives: list[Alternative] = []
    for rival in rivals:
        against = _against(picture, root, rival)
        if not against:
            finding = _capped(finding, rival.finding)
            against = "explains as much"
        if len(alternatives) < _MAX_ALTERNATIVES and rival.finding.cause is not Cause.UNKNOWN:
            alternatives.append(
                Alternative(
                    cause=rival.finding.cause,
                    culprit_ranks=rival.finding.culprit_ranks,
                    confidence=rival.finding.confidence,
                    summary=rival.finding.summary,
                    against=against,
                )
            )
    return finding.changed(alternatives=tuple(alternatives))


def _as_sure_as_seen(picture: Picture, finding: Finding) -> Finding:
    """Lower a finding's confidence from `certain` if ranks besides its culprits left no record.

    Such a rank might have failed before the culprits.
    """
    if finding.confidence is not Confidence.CERTAIN or finding.cause in _SELF_EVIDENT:
        return finding
    unseen = sorted(picture.unseen - set(finding.culprit_ranks))
    if not unseen:
        return finding
    settles = f"the record of {rank_list(unseen)}: what it did, and when, is not known"
    return finding.changed(
        confidence=Confidence.LIKELY, would_settle=(*finding.would_settle, settles)
    )


def _against(picture: Picture, root: Hypothesis, rival: Hypothesis) -> str:
    """Return why the root hypothesis is preferred to a rival, or "" if no reason is found."""
    ranks = rival.finding.culprit_ranks
    if not ranks:
        return "singles out no rank"
    if root.place == rival.place and is_joint(picture, root.finding, rival.finding):
        return "the same operation waits for both"
    if set(ranks) <= root.explains | set(root.finding.culprit_ranks):
        return f"{rank_list(ranks)} {'is' if len(ranks) == 1 else 'are'} explained by the root"
    if rival.is_weak and not root.is_weak:
        return "a missing record is weaker evidence than an existing one"
    disturbed = len(picture.disturbed)
    if len(rival.explains) < len(root.explains):
        return f"explains {len(rival.explains)} of {disturbed} disturbed ranks"
    return ""


def is_joint(picture: Picture, one: Finding, other: Finding) -> bool:
    """Return whether the culprits of both findings hold up the same operation."""
    return picture.graph.is_joint(one.culprit_ranks, other.culprit_ranks)


def _capped(finding: Finding, rival: Finding) -> Finding:
    """Lower a finding's confidence, because a rival explains as many ranks as the finding.

    A rival that is merely `possible` has no effect.
    """
    if rival.confidence is Confidence.POSSIBLE:
        return finding
    highest = Confidence.LIKELY if finding.confidence is Confidence.CERTAIN else Confidence.POSSIBLE
    lowered = min(finding.confidence, highest, key=_ORDER.index)
    who = rank_list(rival.culprit_ranks)
    return finding.changed(
        confidence=lowered,
        would_settle=(*finding.would_settle, f"what came first: {who} explains as much"),
    )
