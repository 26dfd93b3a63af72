"""Turn a `Picture` into a report: run the rules, choose the root finding, and order the findings.

The report lists the root finding (the verdict) first. Further roots follow, and then secondary
findings about ranks that the roots do not name.
"""

from __future__ import annotations

import re
from pathlib import Path

from echelon.analysis.evidence.errors.survived import MAX_DESCRIBED, Survived
from echelon.analysis.evidence.model import Evidence
from echelon.analysis.evidence.picture import Picture, take_picture
from echelon.analysis.evidence.stacks.frames import main_thread, short_site
from echelon.analysis.evidence.stacks.tree import Branch, merge, short_form
from echelon.analysis.finding import Cause, Confidence, Finding, Report, rank_list
from echelon.analysis.hypothesis import Rule, choose, is_joint, propose
from echelon.analysis.rules.calls.mismatch import find_mismatch
from echelon.analysis.rules.calls.parted import find_parted
from echelon.analysis.rules.calls.sizes import find_misfit
from echelon.analysis.rules.calls.skipped import find_skipped
from echelon.analysis.rules.calls.splits import find_split_mismatch
from echelon.analysis.rules.endings.ended import find_ended
from echelon.analysis.rules.endings.missing import find_missing, find_unknown, find_unproven
from echelon.analysis.rules.endings.watchdog import find_given_up
from echelon.analysis.rules.logs.judge import advice_in, find_in_logs
from echelon.analysis.rules.messages.p2p import find_unmatched
from echelon.analysis.rules.messages.torch_dumps import find_messages
from echelon.analysis.rules.waits.apart import find_apart
from echelon.analysis.rules.waits.desync import find_desync
from echelon.analysis.rules.waits.device import find_unstarted
from echelon.analysis.rules.waits.pipeline import find_pipeline
from echelon.analysis.rules.waits.straggler import find_straggler
from echelon.analysis.rules.waits.stuck import find_all_busy, find_lost, find_stuck
from echelon.analysis.rules.waits.transport import find_transport
from echelon.analysis.sources.load import load
from echelon.analysis.sources.logs.folder import FOREIGN as LOGS

# The nearer to a cause, the earlier: a slip explains a mismatch, a mismatch explains endings.
RULES: tuple[Rule, ...] = (
    find_skipped,
    find_mismatch,
    find_split_mismatch,
    find_lost,
    find_ended,
    find_pipeline,
    find_misfit,
    find_unstarted,
    find_parted,
    find_messages,
    find_unmatched,
    find_desync,
    find_all_busy,
    find_apart,
    find_stuck,
    find_given_up,
    find_transport,
)
# Tried in order if no hypothesis was proposed.
FALLBACKS: tuple[Rule, ...] = (find_missing, find_unknown, find_straggler)
_MAX_NAMED = 16
_MESSAGE_CHARS = 300
_ENDINGS = frozenset({Cause.EXCEPTION, Cause.DEAD_PROCESS, Cause.OUT_OF_MEMORY, Cause.DEVICE_STUCK})


def analyze(path: str | Path) -> Report:
    """Read an incident, a `dump/` folder, a run directory or torch's dumps, and return a report.

    Raises:
        DumpFormatError: files exist, but none of them can be read.
        ValueError: the folder does not exist or has no content in a known format.

    Example:
        >>> report = analyze(incident)  # or the folder of a run, or of torch's dumps
        >>> report.verdict.cause.value, report.verdict.culprit_ranks
        ('host_hang', (1,))
    """
    return examine(path)[1]


def examine(path: str | Path) -> tuple[Picture, Report]:
    """Read and diagnose a folder, and return the picture together with the report.

    Raises:
        DumpFormatError: files exist, but none of them can be read.
        ValueError: the folder does not exist or has no content in a known format.
    """
    picture = take_picture(load(Path(path)))
    return picture, report_of(picture)


def diagnose(evidence: Evidence) -> Report:
    """Diagnose the evidence and return the report."""
    return report_of(take_picture(evidence))


def report_of(picture: Picture) -> Report:
    """Run the rules and order their findings, with the root finding first."""
    evidence = picture.evidence
    findings = tuple(
        _cautious(evidence, _named(_with_threads(evidence, _advised(evidence, finding))))
        for finding in _findings(picture)
    )
    is_healthy = all(finding.info for finding in findings)
    return Report(
        world_size=evidence.world_size,
        ranks_present=tuple(evidence.ranks),
        findings=_with_probes(evidence, _with_losses(evidence, _with_survived(picture, findings))),
        origin=evidence.origin,
        warnings=evidence.warnings,
        stacks=() if is_healthy else merged_stacks(evidence),
    )


def merged_stacks(evidence: Evidence) -> tuple[Branch, ...]:
    """Merge the main-thread stacks of all ranks into a tree; return its top-level branches."""
    shown: dict[int, tuple[str, ...]] = {}
    for rank, facts in evidence.ranks.items():
        thread = main_thread(facts.host.stacks) if facts.host.stacks else None
        if thread is not None:
            shown[rank] = short_form(thread.frames)
    return merge(shown)


def _with_survived(picture: Picture, findings: tuple[Finding, ...]) -> tuple[Finding, ...]:
    """Extend the verdict's evidence with the errors that the job survived."""
    root = next((place for place, finding in enumerate(findings) if not finding.info), None)
    if root is None or not picture.survived:
        return findings
    newest = picture.survived[-MAX_DESCRIBED:]
    lines = [_survived_line(one) for one in newest]
    if len(newest) < len(picture.survived):
        lines.append(f"{len(picture.survived) - len(newest)} more errors were caught earlier")
    changed = findings[root].changed(evidence=(*findings[root].evidence, *lines))
    return (*findings[:root], changed, *findings[root + 1 :])


def _survived_line(one: Survived) -> str:
    at = f" at {short_site(one.site)}" if one.site else ""
    what = f"a {one.kind} in {one.operation} #{one.sequence} of group '{one.name}'{at}"
    since = f" for {one.num_steps} steps" if one.num_steps > 1 else ""
    return f"{what} was caught earlier; the job continued{since}"


def _with_losses(evidence: Evidence, findings: tuple[Finding, ...]) -> tuple[Finding, ...]:
    """Extend the verdict's evidence with the ranks that the job lost before this incident."""
    lost = sorted(evidence.incident.lost_earlier)
    root = next((place for place, finding in enumerate(findings) if not finding.info), None)
    if root is None or not lost:
        return findings
    were, them = ("was", "it") if len(lost) == 1 else ("were", "them")
    line = f"{rank_list(lost)} {were} lost earlier, and the job continued without {them}"
    changed = findings[root].changed(evidence=(*findings[root].evidence, line))
    return (*findings[:root], changed, *findings[root + 1 :])


def _with_probes(evidence: Evidence, findings: tuple[Finding, ...]) -> tuple[Finding, ...]:
    """Extend the verdict's evidence with earlier measurements of suspect nodes."""
    root = next((place for place, finding in enumerate(findings) if not finding.info), None)
    if root is None or not evidence.incident.probes:
        return findings
    changed = findings[root].changed(
        evidence=(*findings[root].evidence, *evidence.incident.probes[:_MAX_NAMED])
    )
    return (*findings[:root], changed, *findings[root + 1 :])


def _cautious(evidence: Evidence, finding: Finding) -> Finding:
    """Lower `certain` to `likely` if the snapshot is early and the finding singles out no rank.

    An early snapshot is one taken before the stall timeout has expired.
    """
    differs = 0 < len(finding.culprit_ranks) < evidence.world_size
    if not evidence.incident.is_early or differs or finding.confidence is not Confidence.CERTAIN:
        return finding
    return finding.changed(confidence=Confidence.LIKELY)


def _advised(evidence: Evidence, finding: Finding) -> Finding:
    """Add to the evidence the last recognized error in a culprit's log, with advice on it."""
    if evidence.foreign == LOGS or finding.cause not in _ENDINGS:
        return finding
    for rank in finding.culprit_ranks[:_MAX_NAMED]:
        facts = evidence.ranks.get(rank)
        advice = advice_in(facts.host.stderr_tail) if facts is not None else ""
        if advice:
            return finding.changed(evidence=(*finding.evidence, f"rank {rank} wrote: {advice}"))
    return finding


def _with_threads(evidence: Evidence, finding: Finding) -> Finding:
    """Add to the evidence each exception that ended a culprit's thread but not its process."""
    if finding.info:
        return finding
    lines = []
    for rank in finding.culprit_ranks[:_MAX_NAMED]:
        facts = evidence.ranks.get(rank)
        words = facts.thread_words if facts is not None else None
        if words is not None:
            message = (words.message.splitlines() or [""])[0][:_MESSAGE_CHARS]
            line = (
                f"a thread of rank {rank} ({words.thread}) had ended with {words.type}: {message}"
            )
            lines.append(f"{line} at {short_site(words.site)}" if words.site else line)
    return finding.changed(evidence=(*finding.evidence, *lines))


def _named(finding: Finding) -> Finding:
    """Ensure that the evidence names each culprit as `rank R`.

    A finding with too many culprits to list is returned unchanged.
    """
    text = " ".join(finding.evidence) + " "
    if len(finding.culprit_ranks) > _MAX_NAMED:
        return finding
    unnamed = [r for r in finding.culprit_ranks if not re.search(rf"\brank {r}\b", text)]
    if not unnamed:
        return finding
    names = ", ".join(f"rank {rank}" for rank in unnamed)
    return finding.changed(evidence=(*finding.evidence, f"also involved: {names}"))


def _findings(picture: Picture) -> list[Finding]:
    """Return the root findings, followed by secondary findings that name additional culprits.

    A secondary finding is about ranks that ended, or about ranks that hold up the same operation as
    the culprits of the first root finding.
    """
    if picture.evidence.foreign == LOGS:
        return find_in_logs(picture)
    choice = choose(picture, propose(picture, RULES))
    if not choice.roots:
        found = next((found for rule in FALLBACKS if (found := rule(picture))), [])
        return found if any(not one.info for one in found) else find_unproven(picture) + found
    findings = list(choice.roots)
    first = choice.roots[0]
    for other in choice.rest:
        named = {rank for finding in findings for rank in finding.culprit_ranks}
        is_ending = RULES[other.place] is find_ended
        beside = other.place == choice.place and is_joint(picture, first, other.finding)
        if (is_ending or beside) and not named.issuperset(other.finding.culprit_ranks):
            findings.append(other.finding)
    return findings
