"""Build evidence from echelon's own black boxes.

Records become rows that refer to shared tables. An impossible record, such as one with a forged
rank, is left out with a warning. No value in a record determines how much memory is allocated.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from echelon.analysis.evidence.calls import Call, Tables
from echelon.analysis.evidence.model import ROW, SPAN_ROW, Evidence, Incident, RankEvidence, Span
from echelon.recorder.format.schema import Group, Live, Record

_COPIED = ("sequence", "num_bytes", "peer", "tag", "coalesced", "thread", "flags", "state")
_MAX_PACKED = 1 << 62
_SMALL_TABLE = 1 << 14  # below this a lookup table is cheaper than sorting
_MAX_WORLD = 1 << 18


class EvidenceBuilder:
    """A builder that turns records into an `Evidence`."""

    def __init__(self) -> None:
        self.tables = Tables()
        self.ranks: dict[int, RankEvidence] = {}
        self.groups: list[Group] = []
        self.warnings: list[str] = []
        self.vague_groups: set[int] = set()
        self.foreign = ""
        self._group_index: dict[tuple[object, ...], list[int]] = {}

    def group(self, group: Group) -> int:
        """Return the number of a group, adding the group if its name and members are new."""
        key = (group.name, len(group.ranks), group.ranks[:1], group.ranks[-1:])
        alike = self._group_index.setdefault(key, [])
        for number in alike:
            if self.groups[number].ranks == group.ranks:
                return number
        alike.append(len(self.groups))
        self.groups.append(group)
        return alike[-1]

    def add(self, record: Record) -> None:
        """Add one of echelon's black boxes. A second black box of the same rank is ignored."""
        rank = record.identity.rank
        if not 0 <= rank < _MAX_WORLD:
            self.warnings.append(f"{record.path}: claims to be rank {rank}, left out")
            return
        if rank in self.ranks:
            self.warnings.append(f"{record.path}: a second record of rank {rank}, left out")
            return
        try:
            self.ranks[rank] = self._evidence(record)
        except (ValueError, OverflowError, IndexError, TypeError) as err:
            self.warnings.append(f"{record.path}: damaged record ({err!r}), left out")
            return
        self.warnings += [f"rank {rank}: {text}" for text in record.warnings]

    def _evidence(self, record: Record) -> RankEvidence:
        rank, words = record.identity.rank, record.last_words
        is_threads = words is not None and words.thread != ""
        # Half a record would look like a rank that called nothing; torch's own dump lists all
        # operations.
        is_whole = not record.identity.misses_operations
        return RankEvidence(
            rank=rank,
            rows=self._rows(record) if is_whole else np.zeros(0, ROW),
            identity=record.identity,
            open_spans=tuple(_span(record, row) for row in record.open_spans),
            spans=self._spans(record),
            live=tuple(record.live),
            last_words=None if is_threads else words,
            thread_words=words if is_threads else None,
            fault=record.fault,
            host=record.host,
            has_ring=record.has_ring and is_whole,
            seen_ns=_last_seen(record),
        )

    def _rows(self, record: Record) -> npt.NDArray[Any]:
        operations = record.operations
        rows = np.zeros(len(operations), ROW)
        if not len(operations):
            return rows
        for name in _COPIED:
            rows[name] = operations[name]
        for name in ("p2p_sequence", "step"):
            rows[name] = np.clip(operations[name], -1, 2**31 - 1)
        offset = record.identity.clock_offset_ns
        rows["created_ns"] = operations["created_mono_ns"] + offset
        for name, column in (("started_ns", "started_mono_ns"), ("ended_ns", "completed_mono_ns")):
            rows[name] = np.where(operations[column] > 0, operations[column] + offset, 0)
        groups = [self.group(group) for group in record.groups]
        rows["group"] = np.array(groups, np.int32)[operations["group"]]
        rows["call"] = self._calls(record)
        for name in ("site", "stack", "error"):
            rows[name] = _mapped(operations[name], record.strings, self.tables)
        return rows

    def _calls(self, record: Record) -> npt.NDArray[Any]:
        """Return, for each operation of a record, the index of its call in the shared tables."""
        columns = [record.operations[name] for name in ("operation", "signature", "reduce_op")]
        columns.append(record.operations["root"].astype(np.int64) + 1)
        packed = np.zeros(len(record.operations), np.int64)
        room = 1
        for column in columns:
            wide = column.astype(np.int64)
            room *= int(wide.max()) + 1
            if room >= _MAX_PACKED:  # only a hostile or broken file has tables this large
                _, packed = np.unique(packed, return_inverse=True)
                _, wide = np.unique(wide, return_inverse=True)
                room = (len(packed) + 1) ** 2
            packed = packed * (int(wide.max()) + 1) + wide
        if room <= _SMALL_TABLE:
            first = np.zeros(room, np.int64)
            first[packed[::-1]] = np.arange(len(packed) - 1, -1, -1)
            occurring = np.flatnonzero(np.bincount(packed, minlength=room))
            lookup = np.zeros(room, np.int32)
            rows = record.operations[first[occurring]]
            lookup[occurring] = [self.tables.call(_call(record, row)) for row in rows]
            return lookup[packed]
        _, index, inverse = np.unique(packed, return_index=True, return_inverse=True)
        numbers = [self.tables.call(_call(record, row)) for row in record.operations[index]]
        return np.array(numbers, np.int32)[inverse]

    def _spans(self, record: Record) -> npt.NDArray[Any]:
        out = np.zeros(len(record.spans), SPAN_ROW)
        if not len(record.spans):
            return out
        offset = record.identity.clock_offset_ns
        out["started_ns"] = record.spans["started_mono_ns"] + offset
        out["ended_ns"] = record.spans["ended_mono_ns"] + offset
        out["step"] = np.clip(record.spans["step"], -1, 2**31 - 1)
        for name in ("name", "site"):
            out[name] = _mapped(record.spans[name], record.strings, self.tables)
        return out

    def build(
        self, *, incident: Incident | None = None, origin: str = "", unreadable: Iterable[int] = ()
    ) -> Evidence:
        """Return the evidence from the black boxes added so far."""
        incident = incident or Incident()
        sizes = [facts.identity.world_size for facts in self.ranks.values()]
        world_size = max([incident.world_size, *sizes, *(rank + 1 for rank in self.ranks)])
        ranks = dict(sorted(self.ranks.items()))
        # The lost ranks may all have been replaced: then only time tells the worlds apart.
        if incident.lost_earlier or incident.epoch_since_ns:
            ranks = _of_present_epoch(ranks, self.groups, incident)
        return Evidence(
            world_size=min(world_size, _MAX_WORLD),
            ranks=ranks,
            groups=self.groups,
            tables=self.tables,
            incident=incident,
            origin=origin,
            foreign=self.foreign,
            vague_groups=frozenset(self.vague_groups),
            unreadable=tuple(sorted(unreadable)),
            warnings=tuple(self.warnings),
        )


def _of_present_epoch(
    ranks: Mapping[int, RankEvidence], groups: Sequence[Group], incident: Incident
) -> dict[int, RankEvidence]:
    """Remove lost ranks, and all operations from before the current epoch."""
    lost = incident.lost_earlier.keys()
    old = [number for number, group in enumerate(groups) if not lost.isdisjoint(group.ranks)]
    since, there = incident.epoch_since_ns, incident.epoch_since_there_ns
    return {
        rank: replace(facts, rows=_rows_since(facts, old, there.get(rank, since)))
        for rank, facts in ranks.items()
        if rank not in lost
    }


def _rows_since(facts: RankEvidence, old: Sequence[int], since_ns: int) -> npt.NDArray[Any]:
    # Groups without a lost rank have the same name in each epoch, so that time tells them apart.
    is_old = np.isin(facts.rows["group"], old)
    is_old |= facts.rows["created_ns"] - facts.offset_ns < since_ns
    return facts.rows[~is_old]


def _call(record: Record, row: Any) -> Call:
    return Call(
        record.strings[int(row["operation"])],
        record.signatures[int(row["signature"])],
        record.strings[int(row["reduce_op"])],
        int(row["root"]),
    )


def _mapped(
    refs: npt.NDArray[Any], strings: Sequence[str], tables: Tables
) -> npt.NDArray[np.int32]:
    if len(strings) <= len(refs):
        lookup = np.array([tables.text(text) for text in strings], np.int32)
        return np.asarray(lookup[refs], np.int32)
    unique, inverse = np.unique(refs, return_inverse=True)
    return np.array([tables.text(strings[int(ref)]) for ref in unique], np.int32)[inverse]


def _span(record: Record, row: Any) -> Span:
    offset = record.identity.clock_offset_ns
    ended = int(row["ended_mono_ns"])
    return Span(
        name=record.strings[int(row["name"])],
        detail=record.strings[int(row["detail"])],
        site=record.strings[int(row["site"])],
        step=int(row["step"]),
        started_ns=int(row["started_mono_ns"]) + offset,
        ended_ns=ended + offset if ended else 0,
        thread=int(row["thread"]),
        depth=int(row["depth"]),
    )


def _last_seen(record: Record) -> int:
    """Return the latest time recorded for a rank, on rank 0's clock; 0 if unknown."""
    marks = [record.dumped_mono_ns, record.host.snapshot_mono_ns]
    if len(record.live) > Live.PROGRESS_MONO_NS:
        marks += [record.live[Live.HEARTBEAT_MONO_NS], record.live[Live.PROGRESS_MONO_NS]]
    latest = max(marks)
    return latest + record.identity.clock_offset_ns if latest else 0
