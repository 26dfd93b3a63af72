"""Format the measurements as one table of pairs and one table of nodes.

`!` marks a broken node or pair, and `~` a slow one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median

from echelon.launcher.doctor.pairwise.outcome import LATENCY, RECEIVED, SENT, Outcome
from echelon.launcher.doctor.pairwise.schedule import Pair
from echelon.launcher.doctor.probes.finding import DEVICE, MEMORY, STORAGE, Finding, State

MOST_PAIRS = 28  # rows of unbroken pairs, the worst first; eight hosts have this many


def lines(outcome: Outcome) -> Iterator[str]:
    """Yield the tables, the all-reduce's result, and one line per slow or broken node or pair."""
    if outcome.pairs:
        yield from _pairs(outcome)
    if outcome.nodes:
        yield from _nodes(outcome)
    if outcome.collective is not None:
        yield _collective(outcome.collective)
    for what, how in outcome.slow():
        yield f"~ slower than the others: {what}: {how}"
    yield from _broken(outcome)


def _pairs(outcome: Outcome) -> Iterator[str]:
    slow = {what for what, _ in outcome.slow()}
    whole = [pair for pair, one in outcome.pairs.items() if not one.is_broken]
    whole.sort(key=lambda pair: -outcome.pairs[pair].figures[LATENCY])
    width = max(len(outcome.name_of(pair)) for pair in outcome.pairs)
    yield f"  {'pair':<{width}}  latency us  MB/s there  MB/s back"
    for pair, one in outcome.pairs.items():
        if one.is_broken:
            yield f"! {outcome.name_of(pair):<{width}}  broken"
    for pair in sorted(whole[:MOST_PAIRS]):
        mark = _mark(outcome, pair, slow)
        yield f"{mark} {outcome.name_of(pair):<{width}}  {_row(outcome, pair)}"
    if len(whole) > MOST_PAIRS:
        yield f"  and {len(whole) - MOST_PAIRS} pairs with a lower latency"
    if whole:
        yield f"  {'median':<{width}}  {_medians(outcome, whole)}"


def _mark(outcome: Outcome, pair: Pair, slow: set[str]) -> str:
    members = {outcome.names[member] for member in pair}
    return "~" if outcome.name_of(pair) in slow or members & slow else " "


def _row(outcome: Outcome, pair: Pair) -> str:
    figures = outcome.pairs[pair].figures
    return _figures(figures[LATENCY], figures[SENT], figures[RECEIVED])


def _medians(outcome: Outcome, pairs: Sequence[Pair]) -> str:
    names = (LATENCY, SENT, RECEIVED)
    return _figures(*(median(outcome.pairs[pair].figures[n] for pair in pairs) for n in names))


def _figures(latency_s: float, sent: float, received: float) -> str:
    return f"{latency_s * 1e6:10.0f}  {sent / 1e6:10.0f}  {received / 1e6:9.0f}"


def _nodes(outcome: Outcome) -> Iterator[str]:
    width = max(4, *(len(name) for name in outcome.hosts))
    yield f"  {'node':<{width}}  write ms  fsync ms  memory GB  devices"
    for name, node in zip(outcome.hosts, outcome.nodes, strict=True):
        by_probe = {one.probe: one for one in node}
        mark = "!" if any(one.is_broken for one in node) else " "
        disk, memory = by_probe.get(STORAGE), by_probe.get(MEMORY)
        yield (
            f"{mark} {name:<{width}}  {_figure(disk, 'write_s', 1e3):>8}  "
            f"{_figure(disk, 'fsync_s', 1e3):>8}  {_figure(memory, 'available_bytes', 1e-9):>9}  "
            f"{_devices(by_probe.get(DEVICE))}"
        )


def _figure(finding: Finding | None, name: str, scale: float) -> str:
    if finding is None or name not in finding.figures:
        return "-"
    return f"{finding.figures[name] * scale:.1f}"


def _devices(finding: Finding | None) -> str:
    if finding is None:
        return "-"
    return f"not checked: {finding.text}" if finding.state is State.SKIPPED else finding.text


def _collective(found: dict[str, object]) -> str:
    if found.get("error"):
        return f"! all_reduce: {found['error']}"
    latency_s, bytes_per_s = (float(str(found[name])) for name in (LATENCY, "bytes_per_s"))
    return (
        f"  all_reduce over {found['ranks']} ranks on {found['backend']}: "
        f"{latency_s * 1e6:.0f} us per step, {bytes_per_s / 1e6:.0f} MB/s per rank"
    )


def _broken(outcome: Outcome) -> Iterator[str]:
    for pair, one in outcome.pairs.items():
        if one.is_broken:
            yield f"! broken: {outcome.names[pair[0]]}: {one.text}"
    for name, node in zip(outcome.hosts, outcome.nodes, strict=False):
        for one in node:
            if one.is_broken:
                yield f"! broken: {name}: {one.probe}: {one.text}"
