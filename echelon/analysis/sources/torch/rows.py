"""Convert torch's entries to rows, and handle the quirks of torch's format.

- Gloo's state is always "scheduled"; `retired` means finished *or* failed.
- With NCCL, an entry that is retired but not completed shows that the watchdog timed out.
- Only the closing entry of a coalesced block (`coalesced`) has a state. All operations of a block
  have the same sequence number and are compared as a set.
- `record_id` and `p2p_seq_id` are counted per process, and are never compared between ranks.
- The reduce operation, root, splits, tag and step are not recorded.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from operator import itemgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from echelon.analysis.evidence.calls import NO_VOTE, TRANSPOSED, Call, Tables
from echelon.analysis.evidence.model import ROW
from echelon.analysis.evidence.stacks.frames import Frame, users_frame
from echelon.analysis.sources.torch.blocks import finish_unclosed
from echelon.analysis.sources.torch.counters import Tops
from echelon.analysis.sources.torch.states import (
    NotComparableError,
    Source,
    number_by_group,
    settle_states,
)
from echelon.errors import DumpFormatError
from echelon.recorder.format.schema import Flag, Signature, State

# torchcomms records no peer, and a receive from any rank does not have one yet.
_P2P = re.compile(r"(send|recv)(?: \d{1,7}(?:->|<-)(?:(\d{1,7})|\?))?\Z")
_COALESCED = "coalesced"
_GAVE_UP = "retired before it completed: its timeout passed"
_MAX_FRAMES = 64
_MAX_TENSORS = 4096
_DTYPES = {
    "Float": "float32",
    "Double": "float64",
    "Half": "float16",
    "BFloat16": "bfloat16",
    "Long": "int64",
    "Int": "int32",
    "Short": "int16",
    "Char": "int8",
    "Byte": "uint8",
    "Bool": "bool",
}
# Plain numbers: enum members are slow to put into arrays, and there are millions of entries.
_CREATED, _STARTED, _COMPLETED = int(State.CREATED), int(State.STARTED), int(State.COMPLETED)
_STATES = {"scheduled": _CREATED, "started": _STARTED, "completed": _COMPLETED}
_P2P_FLAG = int(Flag.P2P)
_NAMES = (
    "process_group",
    "pg_id",
    "profiling_name",
    "frames",
    "collective_seq_id",
    "p2p_seq_id",
    "op_id",
    "time_created_ns",
    "time_discovered_started_ns",
    "time_discovered_completed_ns",
    "is_p2p",
    "retired",
    "state",
    "input_sizes",
    "output_sizes",
    "input_dtypes",
    "output_dtypes",
)
_VALUES = itemgetter(*_NAMES)  # all fields of an entry at once: there are millions
_BY_OUTPUT = frozenset(
    {"scatter", "all_gather", "allgather", "_all_gather_base", "all_gather_into_tensor"}
)
# Names that other versions and backends use for the same operation.
_SAME = {
    "_allgather_base": "_all_gather_base",
    "allgather_into_tensor_coalesced": "all_gather_into_tensor_coalesced",
    "all_gather_single": "all_gather_into_tensor",
    "reduce_scatter_single": "reduce_scatter_tensor",
}
_BOTH_SHOWN = TRANSPOSED | {
    "_all_gather_base",
    "all_gather_into_tensor",
    "_reduce_scatter_base",
    "reduce_scatter_tensor",
}
_BY_INPUT = frozenset(
    {
        "all_reduce",
        "allreduce",
        "broadcast",
        "reduce",
        "gather",
        "reduce_scatter",
        "_reduce_scatter_base",
        "reduce_scatter_tensor",
        "all_reduce_coalesced",
        "allreduce_coalesced",
        "all_gather_into_tensor_coalesced",
        "reduce_scatter_tensor_coalesced",
        "all_reduce_sparse",
        "all_reduce_barrier",
    }
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadRows:
    """The contents of one file's entries.

    Attributes:
        tops: the highest counters of each process group, keyed by an index into
            `TorchRows.pairs`.
        called_only: the indices of the groups for which the recorder logs calls but not
            completions.
        counts_in_status: True if `pg_status` counts collectives in the same way as the entries.
    """

    rows: npt.NDArray[Any]
    tops: dict[int, Tops]
    called_only: frozenset[int]
    counts_in_status: bool


class TorchRows:
    """A converter from torch's entries to rows that refer to shared tables."""

    def __init__(self, tables: Tables) -> None:
        self.pairs: list[tuple[str, str]] = []
        self._pair_index: dict[tuple[str, str], int] = {}
        self._tables = tables
        self._calls: dict[tuple[Any, ...], int] = {}
        self._sites: dict[tuple[Any, ...], tuple[int, int]] = {}
        self._names: dict[str, tuple[str, str, int, int]] = {}
        self._sources: list[Source] = []
        self._source_index: dict[tuple[str, bool], int] = {}

    def rows(
        self,
        path: str,
        entries: Sequence[Mapping[str, Any]],
        status: Mapping[int, tuple[int, int]],
    ) -> ReadRows:
        """Return a rank's rows, oldest first, and the other contents of its entries.

        Until the members of all groups are known, `group` is an index into `pairs`, and `peer` is a
        rank in the group.

        Raises:
            DumpFormatError: a field has the wrong type, or the operation numbers cannot be compared
                with those of other ranks.
        """
        try:
            return self._rows(entries, status)
        except NotComparableError as err:
            raise DumpFormatError(f"{path}: {err}", path=path) from err
        except (TypeError, ValueError, OverflowError, KeyError, AttributeError) as err:
            text = f"{path}: damaged entries ({type(err).__name__}: {err})"
            raise DumpFormatError(text, path=path) from err

    def _rows(
        self, entries: Sequence[Mapping[str, Any]], status: Mapping[int, tuple[int, int]]
    ) -> ReadRows:
        frames: dict[int, tuple[int, int]] = {}
        columns: list[tuple[Any, ...]] = []
        locals_: dict[int, Any] = {}
        for entry in entries:
            try:
                values = _VALUES(entry)
            except KeyError:  # from another version
                values = tuple(map(entry.get, _NAMES))
            group, local, full_name, stack, number, message, *rest = values
            name, desc = group or ("", "")
            pair = self._pair_index.get((name, desc))
            if pair is None:
                pair = self._pair(name, desc)
            locals_.setdefault(pair, local)
            parsed = self._names.get(full_name or "")
            if parsed is None:
                parsed = self._names[full_name or ""] = parse_name(full_name or "")
            operation, backend, way, peer = parsed
            source = self._source_index.get((backend, desc == backend))
            if source is None:
                source = self._source(backend, is_comms=desc == backend)
            site = frames.get(id(stack))
            if site is None:
                site = frames[id(stack)] = self._site(stack or ())
            op_id, created, started, ended, is_p2p, retired, state, *arguments = rest
            columns.append(
                (
                    number or 0,
                    message or 0,
                    created or 0,
                    started or 0,
                    ended or 0,
                    pair,
                    self._call(operation, *arguments),
                    *site,
                    peer,
                    op_id or 0,
                    _P2P_FLAG if is_p2p or way else 0,
                    _STATES.get(str(state), _CREATED),
                    source,
                    bool(retired),
                )
            )
        rows = _table(columns)
        written_by = np.array([column[-2] for column in columns], np.int64)
        retired = np.array([column[-1] for column in columns], bool)
        called = settle_states(rows, retired, written_by, self._sources)
        used = [self._sources[number] for number in np.unique(written_by).tolist()]
        if used and all(one.is_comms for one in used):
            number_by_group(rows)
        called_only = frozenset(rows["group"][called].tolist())
        tops = _tops(rows, locals_)
        is_message = (rows["flags"] & _P2P_FLAG) > 0
        rows["sequence"][is_message] = rows["p2p_sequence"][~is_message] = -1
        return ReadRows(
            rows=self._settled(rows, retired, tops, status),
            tops=tops,
            called_only=called_only,
            counts_in_status=all(one.counts_in_status for one in used),
        )

    def _source(self, backend: str, *, is_comms: bool) -> int:
        self._sources.append(Source(backend, is_comms))
        return self._source_index.setdefault((backend, is_comms), len(self._sources) - 1)

    def _pair(self, name: Any, desc: Any) -> int:
        if not isinstance(name, str) or not isinstance(desc, str):
            raise TypeError("a process group has no name")
        self.pairs.append((name[:500], desc[:500]))
        return self._pair_index.setdefault((name, desc), len(self.pairs) - 1)

    def _settled(
        self,
        rows: npt.NDArray[Any],
        retired: npt.NDArray[np.bool_],
        tops: Mapping[int, Tops],
        status: Mapping[int, tuple[int, int]],
    ) -> npt.NDArray[Any]:
        """Merge the entries of each coalesced block, and mark the operations that timed out."""
        gave_up = retired & (rows["state"] != State.COMPLETED)
        if gave_up.any():
            rows["error"][gave_up] = self._tables.text(_GAVE_UP)
        is_end = np.array([call.operation == _COALESCED for call in self._tables.calls], bool)
        closing = np.asarray(is_end[rows["call"]])
        batched = frozenset(rows["group"][closing & ((rows["flags"] & _P2P_FLAG) > 0)].tolist())
        if closing.any():
            rows = self._closed_blocks(rows, closing)
        finish_unclosed(rows, batched=batched, tops=tops, status=status)
        return self._merged(rows)

    def _closed_blocks(
        self, rows: npt.NDArray[Any], closing: npt.NDArray[np.bool_]
    ) -> npt.NDArray[Any]:
        keep = ~closing
        for index in np.flatnonzero(closing).tolist():
            end = rows[index]
            number = "p2p_sequence" if end["flags"] & Flag.P2P else "sequence"
            same = (rows["group"] == end["group"]) & (rows[number] == end[number])
            same &= (rows["flags"] == end["flags"]) & ~closing
            same[index:] = False
            if not same.any():
                keep[index] = number == "sequence"  # a block whose parts the ring has dropped
                continue
            rows["state"][same] = end["state"]
            rows["ended_ns"][same] = end["ended_ns"]
            rows["started_ns"][same] = end["started_ns"]
            rows["error"][same] = end["error"]
            rows["coalesced"][same] = index
        return rows[keep]

    def _merged(self, rows: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Merge the collectives of a coalesced block into one row."""
        collective = np.flatnonzero(rows["sequence"] >= 0)
        packed = (rows["group"][collective].astype(np.int64) << 44) | (
            rows["sequence"][collective] & ((1 << 44) - 1)
        )
        ordered = np.sort(packed)
        if not (ordered[1:] == ordered[:-1]).any():
            return rows
        _, inverse, counts = np.unique(packed, return_inverse=True, return_counts=True)
        keep = np.ones(len(rows), bool)
        for block in np.flatnonzero(counts > 1).tolist():
            members = collective[inverse == block]
            lead = int(members[0])
            keep[members[1:]] = False
            rows["call"][lead] = self._block(rows[members])
            rows["state"][lead] = rows["state"][members].min()
        return rows[keep]

    def _block(self, rows: npt.NDArray[Any]) -> int:
        numbers = sorted(int(call) for call in rows["call"])
        calls = [self._tables.calls[number] for number in numbers]
        names = " + ".join(sorted({call.operation for call in calls}))[:200]
        dtypes = "+".join(sorted({call.signature.dtype for call in calls}))[:120]
        numel = sum(_numel(call.signature.shapes) for call in calls)
        signature = Signature(dtypes, summary=(len(calls), numel, 0))
        if not (rows["coalesced"] >= 0).all():  # its end is missing, so the block may be incomplete
            return self._tables.call(Call(f"{_COALESCED} {names}", signature), NO_VOTE)
        parts = tuple(sorted(self._tables.comparable[number] for number in numbers))
        return self._tables.call(Call(f"{_COALESCED} {names}", signature), (_COALESCED, parts))

    def _call(
        self, operation: str, inputs: Any, outputs: Any, input_dtypes: Any, output_dtypes: Any
    ) -> int:
        key = (
            operation,
            tuple(map(tuple, inputs or ())),
            tuple(map(tuple, outputs or ())),
            tuple(input_dtypes or ()),
            tuple(output_dtypes or ()),
        )
        known = self._calls.get(key)
        if known is None:
            known = self._calls[key] = self._new_call(*key)
        return known

    def _new_call(
        self,
        operation: str,
        inputs: tuple[tuple[Any, ...], ...],
        outputs: tuple[tuple[Any, ...], ...],
        input_dtypes: tuple[Any, ...],
        output_dtypes: tuple[Any, ...],
    ) -> int:
        if len(inputs) > _MAX_TENSORS or len(outputs) > _MAX_TENSORS:
            raise ValueError(
                f"an operation has {max(len(inputs), len(outputs))} tensors, but the limit is "
                f"{_MAX_TENSORS}"
            )
        for size in (*inputs, *outputs):
            if not all(type(n) is int and abs(n) < 1 << 62 for n in size):
                raise ValueError("a tensor's size is not a list of integers")
        names = input_dtypes or output_dtypes
        dtype = "+".join(dict.fromkeys(_DTYPES.get(str(name), str(name)[:40]) for name in names))[
            :120
        ]
        shown = inputs or outputs
        if operation in _BOTH_SHOWN and len(inputs) == 1 and len(outputs) == 1:
            shown = (inputs[0], outputs[0])
        total, out_total = _numel(inputs), _numel(outputs)
        call = Call(
            operation, Signature(dtype, shown if len(shown) <= 8 else (), summary=_summary(shown))
        )
        return self._tables.call(call, _comparable(operation, dtype, total, out_total))

    def _site(self, stack: Any) -> tuple[int, int]:
        key = tuple(
            (frame.get("filename"), frame.get("line"), frame.get("name"))
            for frame in stack[:_MAX_FRAMES]
        )
        known = self._sites.get(key)
        if known is None:
            known = self._sites[key] = self._new_site(key)
        return known

    def _new_site(self, key: tuple[tuple[Any, Any, Any], ...]) -> tuple[int, int]:
        frames = tuple(
            Frame(str(file), line if type(line) is int else 0, str(name))
            for file, line, name in key
        )
        frame = users_frame(frames)
        if frame is None:
            return 0, 0
        lines = [f"{one.file}:{one.line} {one.function}" for one in frames]
        return (
            self._tables.text(f"{frame.file}:{frame.line} {frame.function}"),
            self._tables.text("\n".join(lines)),
        )


def _tops(rows: npt.NDArray[Any], locals_: Mapping[int, Any]) -> dict[int, Tops]:
    """Return the highest collective and message numbers of each (name, description) pair.

    The rows must still contain both numbers as torch assigned them.
    """
    found: dict[int, Tops] = {}
    for pair, local in locals_.items():
        mine = rows["group"] == pair
        found[pair] = Tops(
            collectives=int(rows["sequence"][mine].max()),
            messages=int(rows["p2p_sequence"][mine].max()),
            local_number=local if type(local) is int else -1,
        )
    return found


def parse_name(name: Any) -> tuple[str, str, int, int]:
    """Parse an operation's name into (operation, backend, direction, local peer).

    The direction is 1 for a send, -1 for a receive, and 0 for any other operation.
    """
    if not isinstance(name, str):
        raise ValueError(f"an operation's name is of type {type(name).__name__}, not str")
    backend, colon, rest = name.partition(":")
    operation, backend = (rest, backend) if colon else (backend, "")
    match = _P2P.match(operation)
    if match is None:
        return _SAME.get(operation, operation)[:200], backend, 0, -1
    return match[1], backend, 1 if match[1] == "send" else -1, int(match[2] or -1)


def _comparable(operation: str, dtype: str, total: int, out_total: int) -> object:
    """Return the fields of a collective that must be equal on all of its members."""
    if operation in TRANSPOSED:
        return (operation, dtype)
    if operation in _BY_OUTPUT:
        return (operation, dtype, out_total)
    if operation in _BY_INPUT:
        return (operation, dtype, total)
    return (operation, dtype)


def _numel(sizes: Sequence[Sequence[int]]) -> int:
    return sum(prod(size) for size in sizes)


def _summary(shown: Sequence[Sequence[int]]) -> tuple[int, int, int] | None:
    return None if len(shown) <= 8 else (len(shown), _numel(shown), 0)


def _table(columns: list[tuple[Any, ...]]) -> npt.NDArray[Any]:
    rows = np.zeros(len(columns), ROW)
    names = (
        "sequence",
        "p2p_sequence",
        "created_ns",
        "started_ns",
        "ended_ns",
        "group",
        "call",
        "site",
        "stack",
        "peer",
        "op_id",
        "flags",
        "state",
    )
    for name, values in zip(names, zip(*columns, strict=True), strict=False):
        rows[name] = values
    rows["step"] = rows["tag"] = rows["coalesced"] = -1
    return rows
