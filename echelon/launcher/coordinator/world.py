"""Maintain the state of one attempt and its ranks."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from echelon.launcher.control import messages as m
from echelon.launcher.coordinator import decide
from echelon.launcher.coordinator.gathering.roster import Node
from echelon.launcher.job.report import Ended
from echelon.launcher.limits.rule import LimitRule, Look, View
from echelon.recorder.stall.watchdog import Sight, Stall, StallRule


@dataclass(frozen=True, kw_only=True, slots=True)
class LostEarlier:
    """The losses that an attempt had survived before a given event.

    Attributes:
        ranks: for each lost rank, the first epoch without that rank.
        since_mono_ns: the start of the epoch in which the event occurred; 0 if no rank had been
            lost.
        since_there_ns: the start of this epoch for each rank on another node, by that node's clock.
    """

    ranks: Mapping[int, int] = field(default_factory=dict)
    since_mono_ns: int = 0
    since_there_ns: Mapping[int, int] = field(default_factory=dict)


@dataclass(slots=True)
class World:
    """The state of an attempt, from `Start` until every node is idle.

    Attributes:
        nodes: the ranks of each node.
        hosts: the host name of each node.
        lost: the nodes that were lost.
        owes_notice: whether the ranks are being stopped but have yet to be notified of lost ranks.
        leaving: for each node that is leaving, the signal that its launcher received.
        unkillable: for each rank that survived SIGKILL, the reason.
        end: how the attempt ended; None until all workers have ended.
        clearing: the nodes that are not idle yet; None until all workers have ended.
        is_reported: whether the observers have been notified that all processes have ended.
        epochs: for each complete epoch, the monotonic time, in ns, at which its first rank was
            ready.
        epochs_there: for each complete epoch, when each rank on a remote node was ready, by that
            node's clock.
        published: for each lost rank, the first epoch without that rank, even if the epoch is not
            complete yet.
    """

    number: int
    attempt: decide.Attempt
    rule: StallRule
    nodes: dict[str, range]
    hosts: dict[str, str]
    ended: dict[int, Ended] = field(default_factory=dict)
    lost: list[str] = field(default_factory=list)
    owes_notice: bool = False
    leaving: dict[str, int] = field(default_factory=dict)
    unkillable: dict[int, str] = field(default_factory=dict)
    end: decide.EndAttempt | None = None
    clearing: set[str] | None = None
    clear_deadline_s: float = 0.0
    is_reported: bool = False
    epochs: dict[int, int] = field(default_factory=dict)
    epochs_there: dict[int, Mapping[int, int]] = field(default_factory=dict)
    published: dict[int, int] = field(default_factory=dict)
    started_s: float = field(default_factory=time.monotonic)
    _sights: dict[int, Sight] = field(default_factory=dict)
    _node_of: dict[int, str] = field(default_factory=dict)
    limits: LimitRule = field(default_factory=LimitRule)
    _views: dict[str, View] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        nodes: Sequence[Node],
        *,
        number: int,
        grace_s: float,
        stop_on_stall: bool,
        stall_timeout_s: float,
        report_s: float = 0.0,
        now_mono_ns: int | None = None,
    ) -> World:
        """Create a new attempt on the given nodes.

        Args:
            nodes: the nodes in rank order.
            report_s: the longest interval, in seconds, between two reports from a node whose ranks
                are running.
            now_mono_ns: the current time on the clock by which the ranks' progress is measured;
                None means the monotonic clock.
        """
        now_mono_ns = time.monotonic_ns() if now_mono_ns is None else now_mono_ns
        counts = [node.num_workers for node in nodes]
        firsts = [sum(counts[:i]) for i in range(len(nodes))]
        return cls(
            number=number,
            attempt=decide.Attempt(sum(counts), grace_s=grace_s, stop_on_stall=stop_on_stall),
            rule=StallRule(stall_timeout_s, now_mono_ns),
            nodes={
                node.name: range(first, first + node.num_workers)
                for node, first in zip(nodes, firsts, strict=True)
            },
            hosts={node.name: node.host for node in nodes},
            limits=LimitRule(report_s),
        )

    @property
    def size(self) -> int:
        """One more than the highest number of a rank that is or once was part of the world.

        Some ranks with lower numbers might not have joined yet, because their nodes were late.
        """
        size = sum(map(len, self.nodes.values()))
        while size and self.is_new(size - 1):
            size -= 1
        return size

    @property
    def num_members(self) -> int:
        """The number of ranks that are or once were part of the world."""
        return sum(not self.is_new(rank) for rank in range(self.size))

    @property
    def members(self) -> list[str]:
        """The nodes that are not lost and have a rank that is or once was part of the world."""
        return [node for node in self.present if not self._is_late(node)]

    def _is_late(self, node: str) -> bool:
        """Return whether a node has ranks and none of them has joined yet."""
        ranks = self.nodes[node]
        return bool(ranks) and all(map(self.is_new, ranks))

    def is_new(self, rank: int) -> bool:
        """Return whether a rank belongs to a late node and has yet to join."""
        return rank in self.ended and self.ended[rank].is_new

    @property
    def present(self) -> list[str]:
        """The nodes that are not lost."""
        return [node for node in self.nodes if node not in self.lost]

    def ranks_lost_first(self, earlier: Collection[int] = ()) -> list[int]:
        """Return the ranks of the lost nodes, if the loss of a node was the first failure.

        Args:
            earlier: the ranks without which the attempt had already continued; see `lost_earlier`.
                Their loss does not explain later failures, so they are ignored and not returned.
        """
        failed = [
            one
            for one in self.ended.values()
            if one.code != 0 and not one.is_new and one.rank not in earlier
        ]
        first = min(failed, key=lambda one: one.order, default=None)
        if first is None or first.code is not None:
            return []
        lost = {rank for node in self.lost for rank in self.nodes[node] if not self.is_new(rank)}
        return sorted(lost.difference(earlier))

    @property
    def ranks_lost_for_good(self) -> list[int]:
        """The ranks lost along with their nodes, except those whose loss the attempt survives."""
        lost = {rank for node in self.lost for rank in self.nodes[node]}
        return sorted(
            rank
            for rank, ended in self.ended.items()
            if rank in lost and ended.code is None and not self.is_survived(rank)
        )

    @property
    def records(self) -> bool:
        """True if any rank records its operations."""
        return any(key < 0 for key in self._sights)

    def node_of(self, rank: int) -> str:
        """Return the node that runs a rank."""
        if not self._node_of:
            self._node_of = {r: node for node, ranks in self.nodes.items() for r in ranks}
        return self._node_of[rank]

    def host_of(self, rank: int) -> str:
        """Return the host name of a rank's node."""
        return self.hosts[self.node_of(rank)]

    def note_ended(self, rank: int, code: int | None) -> None:
        """Record a rank's exit code; None means that the rank was lost with its node."""
        order = 1 + max((one.order for one in self.ended.values()), default=-1)
        self.ended[rank] = Ended(rank, code, order)
        self._sights.pop(rank, None)
        # Its node's row may still include it; the next row will not.
        self._sights.pop(_folded(self.nodes[self.node_of(rank)].start), None)

    def note_continued(
        self,
        epoch: int,
        lost: Iterable[int],
        since_mono_ns: int,
        since_there_ns: Mapping[int, int] | None = None,
    ) -> None:
        """Record that the remaining ranks have continued without the lost ranks in a new epoch.

        Args:
            since_mono_ns: when the first rank of the epoch was ready, on the monotonic clock.
            since_there_ns: when each rank on another node was ready, on that node's clock.
        """
        self.epochs[epoch] = since_mono_ns
        self.epochs_there[epoch] = since_there_ns or {}
        for rank in lost:
            self.ended[rank].epoch = self.ended[rank].epoch or epoch

    def grow(self, node: Node, epoch: int) -> range:
        """Add a node that connected late; return its ranks, numbered after all other ranks.

        Until the ranks are admitted, they count as lost, with `epoch` as the first epoch without
        them.
        """
        first = sum(map(len, self.nodes.values()))
        ranks = range(first, first + node.num_workers)
        self.nodes[node.name], self.hosts[node.name] = ranks, node.host
        self._node_of.clear()
        for rank in ranks:
            self.note_ended(rank, None)
            self.ended[rank].epoch = self.published[rank] = epoch
            self.ended[rank].is_new = True
        return ranks

    def admit(self, rank: int) -> tuple[Ended, int]:
        """Count a lost rank as running again; return what `take_back` needs to undo this."""
        return self.ended.pop(rank), self.published.pop(rank)

    def move_ranks(self, lost: str, node: Node) -> None:
        """Assign the ranks of a lost node to another node."""
        names = {name: node.name if name == lost else name for name in self.nodes}
        self.nodes = {names[name]: ranks for name, ranks in self.nodes.items()}
        self.hosts[node.name] = node.host
        self.lost = [name for name in self.lost if name != lost]
        self._views.pop(lost, None)
        self._node_of.clear()

    def take_back(self, rank: int, ended: Ended, epoch: int) -> None:
        """Undo `admit`: count a rank as lost again."""
        self.ended[rank] = ended
        self.published[rank] = epoch

    def is_survived(self, rank: int) -> bool:
        """Return whether a rank was lost and the other ranks continue without it."""
        return rank in self.ended and rank in self.published

    def lost_earlier(self, own: Collection[int], *, is_stall: bool = False) -> LostEarlier:
        """Return the losses that the attempt had already survived before an event.

        Args:
            own: the ranks whose loss is the event; () for any other event.
            is_stall: whether the event is a stall. If so, losses whose epoch is not complete yet
                are included.
        """
        ends = [self.ended[rank].epoch for rank in own if self.ended[rank].epoch]
        end = min(ends, default=max(self.epochs, default=0) + 1)
        since = (ns for number, ns in self.epochs.items() if number < end)
        present = max((number for number in self.epochs if number < end), default=0)
        ranks = {r: one.epoch for r, one in self.ended.items() if one.epoch and r not in own}
        if is_stall:
            ranks = {**self.published, **ranks}
        size = self.size
        return LostEarlier(
            ranks={rank: epoch for rank, epoch in ranks.items() if rank < size},
            since_mono_ns=max(since, default=0),
            since_there_ns=self.epochs_there.get(present, {}),
        )

    def note_sights(self, node: str, event: m.Sights, now_mono_ns: int) -> None:
        """Store a node's latest report about its ranks."""
        if self._is_late(node):
            return  # loading a program is not progress
        for rank in self.nodes[node]:
            self._sights.pop(rank, None)
        self._sights.pop(_folded(self.nodes[node].start), None)
        for rank, initialized, progress_ms, pending_ms, num_ended, records, dumps in event.ranks:
            if rank not in self.ended:
                self._sights[rank] = Sight(
                    rank=rank,
                    initialized=bool(initialized),
                    progress_mono_ns=_stamp(now_mono_ns, progress_ms),
                    pending_mono_ns=_stamp(now_mono_ns, pending_ms),
                    seen_mono_ns=now_mono_ns,
                    num_ended=num_ended,
                    records=bool(records),
                    num_dumps=dumps,
                )
        if event.folded:
            first, initialized, progress_ms, pending_ms, pending_rank, moves, dumps = event.folded
            self._sights[_folded(first)] = Sight(
                rank=_folded(first),
                named_rank=first if pending_rank < 0 else pending_rank,
                initialized=bool(initialized),
                progress_mono_ns=_stamp(now_mono_ns, progress_ms),
                pending_mono_ns=_stamp(now_mono_ns, pending_ms),
                seen_mono_ns=now_mono_ns,
                num_ended=moves,
                num_dumps=dumps,
                dumped_rank=event.dumped_rank,
                patient_until_mono_ns=_later(now_mono_ns, event.patience_ms),
            )
        self._views[node] = View(
            seen_ns=now_mono_ns,
            worked_ns=_stamp(now_mono_ns, event.worked_ms),
            num_moves=event.folded[5] if event.folded else 0,
            is_excused=event.is_excused or bool(event.ranks),
            late_rank=event.late_rank,
            late_since_ns=_stamp(now_mono_ns, event.late_ms),
            limit_s=event.limit_ms / 1e3,
            what=event.what,
        )

    def look(self, now_mono_ns: int) -> Stall | None:
        """Return a newly detected stall, or None. Call this once per tick."""
        return self.rule.look(list(self._sights.values()), now_mono_ns)

    def begin_again(self, now_mono_ns: int) -> None:
        """Treat a reported stall as ended, because the ranks continue after a loss."""
        self.rule.begin_again(now_mono_ns)
        self.limits.begin_again(now_mono_ns)

    def look_early(self, now_mono_ns: int) -> Look | None:
        """Return a `Look` if a slow operation or span calls for an early examination, else None."""
        return self.limits.look([self._views.get(node) for node in self.members], now_mono_ns)

    def why_absent(self, rank: int, late: Collection[str]) -> str:
        """Return the reason that an incident contains no dump of rank `rank`.

        Args:
            late: the nodes whose dumps did not all arrive in time.
        """
        node = self.node_of(rank)
        lost, is_late = node in self.lost, node in late
        what = "is lost" if lost else "did not answer in time" if is_late else "sent none"
        return f"node {self.hosts[node]} {what}"


def _folded(first_rank: int) -> int:
    """Return the key for the combined state of a node's ranks.

    The key is negative, so that it cannot equal a rank.
    """
    return -1 - first_rank


def _later(now_mono_ns: int, left_ms: int) -> int:
    return 0 if left_ms < 0 else now_mono_ns + left_ms * 1_000_000


def _stamp(now_mono_ns: int, age_ms: int) -> int:
    return 0 if age_ms < 0 else now_mono_ns - age_ms * 1_000_000
