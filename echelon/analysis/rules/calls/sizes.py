"""Detect input and output sizes that are inconsistent in the same way on all ranks.

The output of an all_gather contains one input per member, and the input of a reduce_scatter
contains one output per member. Comparing ranks with each other does not reveal this error.
"""

from __future__ import annotations

from math import prod

from echelon.analysis.evidence.calls import Call
from echelon.analysis.evidence.picture import Picture
from echelon.analysis.evidence.stacks.frames import short_site
from echelon.analysis.evidence.streams.streams import Head, Streams
from echelon.analysis.finding import Cause, Confidence, Finding, Scope, rank_list

_GATHERS = frozenset({"_all_gather_base", "all_gather_into_tensor"})
_SCATTERS = frozenset({"_reduce_scatter_base", "reduce_scatter_tensor"})


def find_misfit(picture: Picture) -> list[Finding]:
    """Report an operation whose input and output sizes do not match."""
    streams = picture.streams
    if streams is None or not picture.graph.waits:
        return []
    for head in sorted(streams.heads.values(), key=lambda one: (one.group, one.rank)):
        if not head.is_message and _misfits(streams, head):
            return [_describe(picture, streams, head)]
    return []


def _misfits(streams: Streams, head: Head) -> bool:
    evidence = streams.evidence
    size = len(evidence.groups[head.group].ranks)
    if head.group in evidence.vague_groups:
        return False
    return not _fits(evidence.call(evidence.ranks[head.rank].rows[head.rows[0]]), size)


def _fits(call: Call, size: int) -> bool:
    shapes = call.signature.shapes
    if len(shapes) != 2:
        return True
    first, second = prod(shapes[0]), prod(shapes[1])
    if call.operation in _GATHERS:
        return second == size * first
    if call.operation in _SCATTERS:
        return first == size * second
    return True


def _describe(picture: Picture, streams: Streams, head: Head) -> Finding:
    evidence = picture.evidence
    group = evidence.groups[head.group]
    place = (head.group, head.sequence)
    ranks = tuple(
        rank
        for rank in group.ranks
        if streams.is_at(rank, place) and _misfits(streams, streams.heads[rank])
    )
    row = evidence.ranks[head.rank].rows[head.rows[0]]
    call, site = evidence.call(row), short_site(evidence.site(row))
    inputs, outputs = (list(shape) for shape in call.signature.shapes[:2])
    at = f" at {site}" if site else ""
    larger = "output" if call.operation in _GATHERS else "input"
    smaller = "input" if larger == "output" else "output"
    return Finding(
        cause=Cause.SHAPE_MISMATCH,
        culprit_ranks=ranks,
        confidence=Confidence.LIKELY,
        group=group.name,
        operation=call.operation,
        sequence=head.sequence,
        summary=f"{rank_list(ranks)} called {call.operation} #{head.sequence} of group "
        f"'{group.name}'{at} with an input of {inputs} and an output of {outputs}: the {larger} "
        f"of {len(group.ranks)} ranks must hold {len(group.ranks)} times the {smaller}",
        evidence=(f"{rank_list(ranks)}: input {inputs}, output {outputs}, and none completed it",),
        scope=Scope.GROUP,
        fallout_ranks=picture.fallout(ranks),
        next_action=f"Correct the size of the {larger}{at}; all ranks pass the same wrong one.",
    )
