"""Split writing across ranks that hold the same elements, after verifying that their copies match.

[Note: the proof] Tensors with equal names, shapes and ranges are not necessarily replicas. For
example, each pipeline stage might number its layers from 0. Ranks that seem to hold replicas
therefore compare checksums, and a difference raises an error that names the tensor and two ranks.
Ranks with replicas of a whole model exchange only a few bytes each. Ranks with different shards
exchange 24 bytes per tensor.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from echelon.dist.checkpoint.ranks.peers import Peers, together
from echelon.dist.checkpoint.state.checksum import checksum
from echelon.dist.checkpoint.state.collect import Contents
from echelon.dist.checkpoint.state.held import Held, share

_ROW = struct.Struct("<QQQ")  # path, shape and dtype, range: hashes
Holders = tuple[int, ...]


class _Row(NamedTuple):
    """Hashes of a tensor's path, of its shape and dtype, and of the range that one rank holds."""

    path: int
    kind: int
    range: int


def settle(peers: Peers, doing: str, contents: Contents) -> None:
    """Check that each entry has the same kind on all ranks, and add staged values to `contents`.

    Staged values (see `Contents.set_local`) that differ between ranks are stored once per rank.
    Collective.

    Raises:
        ValueError: an entry has a different kind on another rank.
        CheckpointError: another rank detected that an entry's kinds differ.
    """
    everyones = peers.all_gather([contents.kinds, contents.local_checksums()])
    together(peers, doing, lambda: _require_kinds(contents.kinds, [one for one, _ in everyones]))
    known: dict[str, int] = {}
    differing = set()
    for _, checksums in everyones:
        for path, value in checksums.items():
            if known.setdefault(path, value) != value:
                differing.add(path)
    contents.add_local(differing, peers.rank)


def divide(
    peers: Peers, doing: str, held: Sequence[Held], aliases: Mapping[str, str]
) -> list[Held]:
    """Return the pieces of tensors that this rank must write. Collective.

    Raises:
        ValueError: this rank and another rank hold different tensors under the same name.
        CheckpointError: another rank detected different tensors under the same name.
    """
    rows = [_row(one) for one in held]
    forms = {one.path: f"{one.dtype}{list(one.shape)}" for one in held}
    forms |= {path: f"tied to {target}" for path, target in aliases.items()}
    tied = [_Row(_hash(path), _hash(forms[path]), 0) for path in aliases]
    tables = _exchange(peers, rows + tied)
    together(peers, doing, lambda: _require_forms(forms, tables, peers.rank))
    holders: dict[_Row, list[int]] = {}
    for rank, table in enumerate(tables):
        for row in table:
            holders.setdefault(row, []).append(rank)
    alike: dict[Holders, list[Held]] = {}
    for one, row in zip(held, rows, strict=True):
        alike.setdefault(tuple(holders[row]), []).append(one)
    _require_equal(peers, doing, {ranks: part for ranks, part in alike.items() if len(ranks) > 1})
    mine: list[Held] = []
    for ranks, part in alike.items():
        mine += share(part, ranks.index(peers.rank), len(ranks))
    return mine


def _require_kinds(own: dict[str, str], everyones: list[dict[str, str]]) -> None:
    for rank, kinds in enumerate(everyones):
        for path in sorted(own.keys() & kinds.keys()):
            if own[path] != kinds[path]:
                first, second = _in_order((everyones.index(own), own), (rank, kinds))
                raise ValueError(
                    f"{path} has kind {first[1][path]} on rank {first[0]}, but kind "
                    f"{second[1][path]} on rank {second[0]}"
                )


def _in_order(
    one: tuple[int, dict[str, str]], other: tuple[int, dict[str, str]]
) -> tuple[tuple[int, dict[str, str]], tuple[int, dict[str, str]]]:
    return (one, other) if one[0] < other[0] else (other, one)


def _row(held: Held) -> _Row:
    return _Row(
        _hash(held.path),
        _hash(f"{held.dtype}{list(held.shape)}"),
        _hash(f"{held.start} {held.length} {held.repeats} {held.sharded}"),
    )


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def _exchange(peers: Peers, rows: list[_Row]) -> list[list[_Row]]:
    """Return the table of each rank: one row per tensor that the rank holds. Collective.

    If several ranks have the same table, only one of these ranks sends it.
    """
    packed = b"".join(_ROW.pack(*row) for row in sorted(rows))
    digests = peers.all_gather(hashlib.blake2b(packed, digest_size=16).digest())
    if len(set(digests)) == 1:
        return [rows] * peers.size
    is_first = digests.index(digests[peers.rank]) == peers.rank
    sent = peers.all_gather(packed if is_first else b"")
    known = {
        digest: [_Row(*numbers) for numbers in _ROW.iter_unpack(table)]
        for digest, table in zip(digests, sent, strict=True)
        if table
    }
    return [known.get(digest, []) for digest in digests]


def _require_forms(forms: dict[str, str], tables: list[list[_Row]], rank: int) -> None:
    """Check that tensors with the same name have the same dtype and shape on all ranks."""
    own = {_hash(path): path for path in forms}
    for other, table in enumerate(tables):
        for row in table if table is not tables[rank] else ():
            path = own.get(row.path)
            if path is not None and _hash(forms[path]) != row.kind:
                raise ValueError(
                    f"{path} is {forms[path]} on rank {rank}, but differs on rank {other}: "
                    "different tensors need different names"
                )


def _require_equal(peers: Peers, doing: str, alike: dict[Holders, list[Held]]) -> None:
    """Check that ranks that hold the same tensor have identical copies of it. Collective."""
    checksums = {
        ranks: [checksum(one.data) for one in part] for ranks, part in sorted(alike.items())
    }
    sums = {ranks: _digest(values) for ranks, values in checksums.items()}
    everyones = [
        {tuple(ranks): value for ranks, value in pairs}
        for pairs in peers.all_gather([[list(ranks), value] for ranks, value in sums.items()])
    ]
    differing = sorted(
        {
            ranks
            for sums_there in everyones
            for ranks, value in sums_there.items()
            if value != everyones[ranks[0]][ranks]
        }
    )
    if not differing:  # on every rank
        return
    detail = [[list(ranks), checksums[ranks]] for ranks in differing if ranks in checksums]
    details = [
        {tuple(ranks): values for ranks, values in pairs} for pairs in peers.all_gather(detail)
    ]
    together(peers, doing, lambda: _name_difference(peers.rank, differing, alike, details))


def _digest(values: Iterable[int]) -> int:
    return zlib.crc32(b"".join(value.to_bytes(8, "little") for value in values))


def _name_difference(
    rank: int,
    differing: list[Holders],
    alike: dict[Holders, list[Held]],
    details: list[dict[Holders, list[int]]],
) -> None:
    for ranks in differing:
        if rank not in ranks:
            continue
        first = details[ranks[0]][ranks]
        for other in ranks[1:]:
            values = zip(alike[ranks], first, details[other][ranks], strict=True)
            for one, value, value_there in values:
                if value != value_there:
                    raise ValueError(
                        f"{one.path} differs between ranks {ranks[0]} and {other}: replicas "
                        "must be equal, and different tensors need different names"
                    )
