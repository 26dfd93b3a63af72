"""Make the copies of one world, and find the copies that this process can read.

Each rank writes its parts of the model alternately to two memory segments, so that one complete
copy always exists. A place is a set of ranks that can map each other's memory. All ranks at a place
open each other's segments. If there are several places, each rank also sends its copies to a
partner at another place, unless another place has a replica of the rank's parts. The partner stores
the copies in two segments that all ranks at its place can read.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from echelon.dist.channel import Channel
from echelon.dist.group import ProcessGroup
from echelon.dist.resilient.copies.choice import (
    Offer,
    Sets,
    Version,
    partners_of,
    without_replicas_elsewhere,
)
from echelon.dist.resilient.copies.copying import Copying
from echelon.dist.resilient.copies.filling import crc_of
from echelon.dist.resilient.copies.memory import Address, CopyMemory, Stamp
from echelon.dist.resilient.copies.shards import ShardsWriter
from echelon.dist.work import Work
from echelon.errors import CollectiveError, PeerLostError
from echelon.host.identity import process_identity

_NUM = 2
_VOID = -1  # the step of a copy whose source changed while it was copied


@dataclass(frozen=True, slots=True)
class _Held:
    """The memory segments in which one rank (the keeper) stores the copies of one owner's parts."""

    owner: int
    keeper: int
    memories: tuple[CopyMemory, ...]


class WorldCopies:
    """The copies of the shards of one world's ranks. Creating this object is collective.

    Args:
        group: the world's group.
        epoch: the world's epoch.
        sets: the group's ranks, grouped into sets. The ranks of a set hold the same parts of the
            model.

    Attributes:
        epoch: the world's epoch.
        roster: the world's ranks, as numbered by the launcher.
        sets: the ranks in `roster`, grouped into sets in the same way.
        own_rank: this rank, as numbered by the launcher.
        is_one_place: True if all ranks can read each other's memory, in which case no copies are
            exchanged.

    Raises:
        CollectiveError: a rank was lost, or the memory of a rank on this host cannot be opened.
    """

    def __init__(self, group: ProcessGroup, epoch: int, sets: Sets) -> None:
        self.epoch = epoch
        self.roster = tuple(group.ranks)
        self.sets = [[self.roster[place] for place in alike] for alike in sets]
        self._group = group
        places = [tuple(one) for one in group.all_gather_object(_place())]
        machines = [place[0] or place for place in places]  # by boot id, if that can be read
        apart = machines if len(set(machines)) > 1 else places
        partners = without_replicas_elsewhere(partners_of(places, machines), sets, apart)
        me = group.rank
        self.is_one_place = len(set(places)) == 1
        self.own_rank = self.roster[me]
        self._here = [self.roster[i] for i, place in enumerate(places) if place == places[me]]
        self._partner = partners[me]
        self._num_written = 0
        self._channels: dict[int, Channel] = {}
        self._readable: list[_Held] = []
        self._own = self._make(self.own_rank)
        owners = [i for i, partner in enumerate(partners) if partner == me]
        self._kept = {i: self._make(self.roster[i]) for i in owners}
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    def _make(self, owner: int) -> _Held:
        memories = tuple(CopyMemory.create() for _ in range(_NUM))
        self._readable.append(_Held(owner, self.own_rank, memories))
        return self._readable[-1]

    def _open(self) -> None:
        """Open the memory segments of the other ranks at this rank's place. Collective."""
        told = [
            (one.owner, [asdict(memory.address) for memory in one.memories])
            for one in self._readable
        ]
        for keeper, row in zip(self.roster, self._group.all_gather_object(told), strict=True):
            if keeper == self.own_rank or keeper not in self._here:
                continue
            for owner, addresses in row:
                memories = tuple(opened(keeper, Address(**one)) for one in addresses)
                self._readable.append(_Held(owner, keeper, memories))
        self._group.barrier()

    # ---- writing ----

    @property
    def timeout_s(self) -> float:
        """The time limit for making a copy and exchanging it with the partners, in seconds."""
        return self._group.timeout_s * (2 + 2 * len(self._kept))

    @property
    def num_bytes(self) -> int:
        """The total size of the copies that this rank stores, including its own, in bytes."""
        held = [self._own, *self._kept.values()]
        return sum(memory.num_bytes for one in held for memory in one.memories)

    def begin(self, writer: ShardsWriter, step: int) -> Copying:
        """Begin a copy of the state: write the data that can change once the next step begins.

        The returned object writes the rest of the state, and exchanges copies with the partner
        ranks if some ranks cannot map each other's memory.

        Raises:
            OSError: the host has no memory left.
        """
        turn = self._num_written % _NUM
        self._num_written += 1
        memory = self._own.memories[turn]
        memory.erase()
        content = memory.content(writer.num_bytes)
        first_crc = writer.write_first(content)

        def complete() -> Stamp:
            crc = writer.write_rest(content, first_crc)
            return Stamp(Version(step, self.epoch), self.own_rank, writer.num_bytes, crc)

        def commit(stamp: Stamp, is_void: bool) -> Stamp:
            if is_void:
                return replace(stamp, version=Version(_VOID, self.epoch))
            memory.commit(stamp)
            return stamp

        def exchange(stamp: Stamp, timeout_s: float | None) -> None:
            if not self.is_one_place:
                self._exchange(turn, stamp, content, timeout_s)

        return Copying(step, complete, commit, exchange)

    def discard_newest(self) -> None:
        """Make the next copy overwrite the newest one, so that the one before it is retained.

        All ranks must call this if the newest copy of any rank is void.
        """
        newest = (self._num_written - 1) % _NUM
        for held in (self._own, *self._kept.values()):
            held.memories[newest].erase()
        self._num_written -= 1

    def void_newest(self) -> None:
        """Erase the stamp of this rank's newest copy."""
        self._own.memories[(self._num_written - 1) % _NUM].erase()

    def _exchange(
        self, turn: int, stamp: Stamp, content: torch.Tensor, timeout_s: float | None
    ) -> None:
        sent: list[Work | None] = []
        if self._partner is not None:
            channel = self._channel(self._partner)
            head = torch.frombuffer(bytearray(stamp.pack()), dtype=torch.uint8)
            sent = [
                channel.send(one, async_op=True, timeout_s=timeout_s) for one in (head, content)
            ]
        for sender, held in self._kept.items():
            self._receive(self._channel(sender), held.memories[turn], timeout_s)
        for work in sent:
            if work is not None:
                work.wait()

    @staticmethod
    def _receive(channel: Channel, memory: CopyMemory, timeout_s: float | None) -> None:
        memory.erase()
        head = torch.empty(Stamp.num_bytes_packed(), dtype=torch.uint8)
        channel.recv(head, timeout_s=timeout_s)
        stamp = Stamp.unpack(head.numpy().tobytes())
        if stamp is None:
            raise CollectiveError("the header of a copy of a rank's state was damaged in transit")
        channel.recv(memory.content(stamp.num_bytes), timeout_s=timeout_s)
        if stamp.version.step != _VOID:
            memory.commit(stamp)

    def _channel(self, peer: int) -> Channel:
        if peer not in self._channels:
            self._channels[peer] = self._group.channel(peer, "copies")
        return self._channels[peer]

    # ---- reading ----

    def offers(self, survivors: Sequence[int]) -> Iterator[Offer]:
        """Yield the copies that this rank offers to read on behalf of all survivors.

        Each survivor offers its own copies. Of the survivors that can map each other's memory, the
        lowest rank also offers the copies of lost ranks. Incomplete and damaged copies are omitted.
        """
        reads_for_lost = self.own_rank == min(rank for rank in self._here if rank in survivors)
        for held in self._readable:
            is_lost = held.owner not in survivors
            if held is self._own or (is_lost and reads_for_lost):
                for memory in held.memories:
                    stamp = memory.stamp
                    if stamp is not None and stamp.owner == held.owner and memory.is_intact():
                        yield Offer(stamp.version, stamp.owner)

    def find(self, version: Version, owner: int) -> CopyMemory | None:
        """Return the memory segment that holds a copy, or None if this process cannot read it."""
        for held in self._readable:
            for memory in held.memories:
                stamp = memory.stamp
                if stamp is not None and (stamp.version, stamp.owner) == (version, owner):
                    return memory
        return None

    def newest_own(self) -> torch.Tensor:
        """Return this rank's newest copy, [num_bytes] of uint8."""
        memory = self._own.memories[(self._num_written - 1) % _NUM]
        stamp = memory.stamp
        assert stamp is not None, self._num_written
        return memory.content(stamp.num_bytes)

    def close(self) -> None:
        """Close all memory segments in this process."""
        for held in self._readable:
            for memory in held.memories:
                memory.close()
        self._readable.clear()


def collected(
    worlds: Sequence[WorldCopies], group: ProcessGroup, version: Version, holders: Mapping[int, int]
) -> Iterator[torch.Tensor]:
    """Yield the copies of all shards of a state, one at a time. Collective.

    If all ranks can map each other's memory, they read the copies directly. A rank that was not in
    the world in which the copies were made opens the memory temporarily. Otherwise, each copy is
    broadcast, so every rank needs memory for one more copy.

    Args:
        worlds: the worlds whose copies this rank can read; empty on a joining rank.
        group: the ranks that restore the state.
        version: the version of the state to restore.
        holders: see `Choice.holders`.

    Raises:
        CollectiveError: a rank was lost, or a copy cannot be read or was damaged in transit.
    """
    world = next((one for one in worlds if one.epoch == version.epoch), None)
    memories = {owner: world.find(version, owner) for owner in sorted(holders)} if world else {}
    told = [
        [owner, asdict(memory.address)]
        for owner, memory in memories.items()
        if memory is not None and holders[owner] == group.ranks[group.rank]
    ]
    rows = group.all_gather_object([_place(), told])
    is_one_place = len({tuple(place) for place, _ in rows}) == 1
    addresses = {owner: Address(**address) for _, found in rows for owner, address in found}
    for owner, holder in sorted(holders.items()):
        memory = memories.get(owner)
        if not is_one_place:
            copy = None if memory is None else _content(memory, owner)
            yield _broadcast(group, copy, group.ranks.index(holder))
        elif memory is not None:
            yield _content(memory, owner)
        elif owner not in addresses:
            raise _unreadable(owner)
        else:
            with contextlib.closing(opened(holder, addresses[owner])) as memory:
                yield _content(memory, owner)


def _content(memory: CopyMemory, owner: int) -> torch.Tensor:
    stamp = memory.stamp
    if stamp is None:
        raise _unreadable(owner)
    return memory.content(stamp.num_bytes)


def _unreadable(owner: int) -> CollectiveError:
    return CollectiveError(f"the copy of rank {owner}'s state can no longer be read")


def _broadcast(group: ProcessGroup, copy: torch.Tensor | None, root: int) -> torch.Tensor:
    head = torch.zeros(2, dtype=torch.int64)
    if group.rank == root:
        assert copy is not None
        head[0], head[1] = copy.numel(), crc_of(copy)
    group.broadcast(head, root=root)
    num_bytes, crc = head.tolist()
    if group.rank != root:
        copy = torch.empty(num_bytes, dtype=torch.uint8)
    assert copy is not None
    group.broadcast(copy, root=root)
    if crc_of(copy) != crc:
        raise CollectiveError("a copy of a rank's state was damaged in transit")
    return copy


def sets_of(size: int, num_replicas: int) -> list[list[int]]:
    """Divide the `size` ranks of a group into sets whose ranks hold the same shards.

    Example:
        >>> sets_of(6, 2), sets_of(2, 1)
        ([[0, 3], [1, 4], [2, 5]], [[0], [1]])
    """
    num_shards = size // num_replicas
    return [list(range(place, size, num_shards)) for place in range(num_shards)]


def _place() -> list[Any]:
    fact = process_identity()
    return [fact["boot"], fact["net"], fact["pids"]]


def opened(keeper: int, address: Address) -> CopyMemory:
    """Open a memory segment that another rank on this host owns.

    Raises:
        PeerLostError: the other rank has ended, or has closed the segment.
        CollectiveError: the operating system denies access.
    """
    try:
        return CopyMemory.open(address)
    except OSError as err:
        text = f"the memory that rank {keeper} keeps cannot be opened: {err}"
        if isinstance(err, (FileNotFoundError, ProcessLookupError)) or _has_ended(address.pid):
            raise PeerLostError(text, ranks=[keeper]) from err
        raise CollectiveError(text) from err


def _has_ended(pid: int) -> bool:
    """Return whether a process has ended; a zombie counts as ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return not Path(f"/proc/{pid}").exists()
    return stat.rpartition(b")")[2].split()[:1] in ([b"Z"], [b"X"])
