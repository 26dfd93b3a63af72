"""Provide the shm+gloo backend: shared memory within a host, and Gloo between hosts.

The following table applies to L ranks per host and n bytes per array. The code calls the intra-host
level "inside" and the inter-host level "across".

    all_reduce       intra-host reduce_scatter, inter-host all_reduce of n/L, intra-host all_gather
    reduce_scatter   intra-host reduce_scatter, then inter-host reduce_scatter of the sums
    all_gather       inter-host all_gather, then intra-host all_gather
    broadcast        inter-host broadcast from the root, then intra-host broadcast on each host
    messages         shared memory within a host, Gloo between hosts; an any-source receive runs on
        both levels, and one level receives the message (see messages/either.py)

Each byte therefore crosses the network once per host rather than once per rank. Some operations use
a single Gloo mesh of all ranks instead: all_to_all, gather, scatter, collectives with uneven
splits, and sums in rank order. Groups with one rank per host, or with unequal numbers of ranks per
host, also use this mesh.

The ranks' calls are compared on both levels, first within each host and then between hosts. Every
rank can therefore name a mismatching rank on any host.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from echelon.dist.arithmetic import inline
from echelon.dist.arithmetic.reduce import reduce
from echelon.dist.arithmetic.reduce_numpy import divide
from echelon.dist.arithmetic.widening import (
    Scratch,
    array_of,
    carried_of,
    convert,
    summing_of,
    wide_of,
)
from echelon.dist.backends.gloo import backend as gloo
from echelon.dist.backends.host_engine import HostEngine
from echelon.dist.backends.interface import EndedElsewhere, Engine, Members, Pending, Watch
from echelon.dist.backends.level import Level, LevelWatch
from echelon.dist.backends.shm import backend as shm
from echelon.dist.errors import build
from echelon.dist.errors.mismatch import mismatch_error
from echelon.dist.membership.meet import exchange
from echelon.dist.messages.either import EitherPending
from echelon.dist.operation.arrays import Flat
from echelon.dist.operation.operation import ANY_SOURCE, Operation
from echelon.errors import CollectiveError, CollectiveMismatchError
from echelon.host.identity import host_identity
from echelon.store import PrefixStore
from echelon.store.deadline import time_left_s


def not_ready() -> str:
    """Return the reason this machine cannot run the backend, or "" if it can."""
    return shm.not_ready() or gloo.not_ready()


def create(members: Members, store: PrefixStore, timeout_s: float) -> Engine:
    """Create the engine for a group; every member must call this.

    Raises:
        CollectiveTimeoutError: some members did not join within `timeout_s` seconds.
    """
    return TwoLevelEngine(members, store, timeout_s)


_CHUNK_BYTES = 2 << 20  # of a share, between two hosts
_LATER_S = 5.0  # a receive inside the host ends so much later than the one between hosts
_Agree = Callable[[], Flat]  # returns every rank's call and small data, in rank order


class TwoLevelEngine(HostEngine):
    """An engine that carries out operations on two levels: within hosts and between hosts."""

    name = "shm+gloo"

    def __init__(self, members: Members, store: PrefixStore, timeout_s: float) -> None:
        super().__init__(members)
        self._is_closed = False
        self._scratch = Scratch()
        deadline_s = time.monotonic() + timeout_s
        facts = exchange(members, store, "levels", host_identity(), deadline_s)
        hosts: dict[str, list[int]] = {}
        for rank, fact in enumerate(facts):
            hosts.setdefault(json.dumps(fact, sort_keys=True), []).append(rank)
        self._hosts = list(hosts.values())  # group ranks, by host
        self._is_even = len({len(ranks) for ranks in self._hosts}) == 1
        self._mine = next(i for i, ranks in enumerate(self._hosts) if members.rank in ranks)
        self._place = self._hosts[self._mine].index(members.rank)
        self._order = [rank for ranks in self._hosts for rank in ranks]  # by host, then place
        self._deadline_s = deadline_s
        self._across: Level | None = None
        with contextlib.ExitStack() as made:
            self._flat = gloo.GlooEngine(members, PrefixStore("flat", store), timeout_s)
            made.callback(self._flat.close)
            self._inside = self._level_inside(f"inside/{self._mine}", store)
            made.callback(self._inside.engine.close)
            if self._is_even and 1 < len(self._hosts) < self._size:
                self._gloo, self._across = self._level_across(f"across/{self._place}", store)
            made.pop_all()
        self._run: dict[str, Callable[[Operation, Watch, _Agree], None]] = {
            "barrier": self._barrier,
            "all_reduce": self._all_reduce,
            "all_gather": self._all_gather,
            "reduce_scatter": self._reduce_scatter,
            "broadcast": self._broadcast,
        }

    def _level_inside(self, path: str, store: PrefixStore) -> Level:
        near = self._hosts[self._mine]
        members = self._some(near)
        left_s = time_left_s(self._deadline_s)
        return Level(members, shm.create(members, PrefixStore(path, store), left_s), near)

    def _level_across(self, path: str, store: PrefixStore) -> tuple[gloo.GlooEngine, Level]:
        alike = [ranks[self._place] for ranks in self._hosts]
        members = self._some(alike)
        left_s = time_left_s(self._deadline_s)
        engine = gloo.GlooEngine(members, PrefixStore(path, store), left_s, is_step=True)
        return engine, Level(members, engine, alike)

    def _some(self, ranks: list[int]) -> Members:
        return dataclasses.replace(
            self._members,
            rank=ranks.index(self._members.rank),
            ranks=[self._members.ranks[rank] for rank in ranks],
        )

    def execute(self, operation: Operation, watch: Watch) -> None:
        """Carry out one operation; block until it is done on this rank."""
        if operation.is_message:
            engine, operation, watch = self._route(operation, watch)
            engine.execute(operation, watch)
        else:
            super().execute(operation, watch)

    def submit(self, operation: Operation, watch: Watch) -> Pending:
        """Start one operation."""
        if operation.is_message:
            if self._spans_levels(operation):
                return self._submit_to_both(operation, watch)
            engine, operation, watch = self._route(operation, watch)
            return engine.submit(operation, watch)
        return super().submit(operation, watch)

    def cut(self, reason: CollectiveError | None) -> None:
        """Abort all work in every engine.

        Closing the group while a collective is running is treated as a failure.
        """
        if reason is None and not self._serial.is_idle:
            reason = build.closed(self._members, Operation("close", 0))
        for engine in self._engines():
            engine.cut(reason)

    def close(self) -> None:
        """Release every engine."""
        if self._is_closed:
            return
        self._is_closed = True
        self.close_threads()
        for engine in self._engines():
            engine.close()

    def _engines(self) -> list[Engine]:
        levels = [self._inside] + ([self._across] if self._across is not None else [])
        return [self._flat, *(level.engine for level in levels)]

    # ---- dispatch ----

    def carry_out(self, operation: Operation, watch: Watch) -> None:
        """Run the next collective on the calling thread; block until it is done."""
        try:
            if self._across is None:
                self._flat.carry_out(operation, watch)
                return
            # Compared before a way is chosen: ranks that differ might choose different ones.
            agree = self._start_comparing(operation, watch)
            if inline.is_small(operation):
                inline.finish(operation, agree(), self._members.rank)
            elif self._is_flat(operation):
                agree()
                self._flat.carry_out(operation, watch)
            else:
                self._run[operation.kind](operation, watch, agree)
        except CollectiveError as err:
            raise self._retold(operation, err) from None
        except EndedElsewhere as err:
            raise EndedElsewhere(self._retold(operation, err.error)) from None

    def _is_flat(self, operation: Operation) -> bool:
        ordered = self._members.options.reduction == "rank_ordered" and operation.reduce_op
        is_uneven = bool(operation.input_splits or operation.output_splits)
        return bool(ordered) or is_uneven or operation.kind not in self._run

    def _retold(self, operation: Operation, error: CollectiveError) -> CollectiveError:
        """Return an error that names the user's call instead of one of its steps."""
        told = str(error).startswith(build.place(self._members, operation))
        if told or isinstance(error, CollectiveMismatchError):
            return error
        if type(error) is CollectiveError:
            return build.aborted(self._members, operation)
        places = {rank: place for place, rank in enumerate(self._members.ranks)}
        ranks = [places[rank] for rank in error.ranks if rank in places]
        if isinstance(error, TimeoutError):
            return build.timed_out(self._members, operation, ranks)
        return build.peer_lost(self._members, operation, ranks)

    def _start_comparing(self, operation: Operation, watch: Watch) -> _Agree:
        """Compare the ranks' calls within the host, and start comparing them between hosts.

        The returned function completes the comparison. The caller's arrays must not be modified
        before the returned function has completed.
        """
        assert self._across is not None
        plain = Operation("all_gather", 0, dtype="uint8")
        mine = inline.pack(operation)
        inside = np.empty((self._inside.members.size, len(mine)), np.uint8)
        self._inside.run("all_gather", mine, inside.reshape(-1), plain, watch)
        by_host = np.empty((self._size, len(mine)), np.uint8)
        across = self._gloo
        work = across.start_all_gather(by_host.reshape(-1), inside.reshape(-1))

        def agree() -> Flat:
            across.finish(watch, work)
            rows = np.empty_like(by_host)
            rows[self._order] = by_host
            if not inline.are_equal(rows, mine):
                raise mismatch_error(self._members, operation, inline.calls(rows))
            return rows

        if not inline.are_equal(inside, mine):
            agree()
        return agree

    # ---- the collectives ----

    def _barrier(self, operation: Operation, watch: Watch, agree: _Agree) -> None:  # noqa: ARG002
        agree()

    def _all_reduce(self, operation: Operation, watch: Watch, agree: _Agree) -> None:
        assert self._across is not None
        data = array_of(operation.target)
        if len(self._hosts) == 2 and len(data):
            self._all_reduce_between_two(operation, watch, agree)
            return
        total = self._total_inside(operation, watch, data)
        agree()
        self._across.run(
            "all_reduce", total, total, operation, watch,
            dtype=wide_of(operation), reduce_op=summing_of(operation),
        )  # fmt: skip
        self._gather_inside(operation, watch, total, data)

    def _all_reduce_between_two(self, operation: Operation, watch: Watch, agree: _Agree) -> None:
        """Swap shards with the other host, reducing one chunk while the next is in transit."""
        data, num_inside = array_of(operation.target), self._inside.members.size
        most = max(1, _CHUNK_BYTES // np.dtype(carried_of(operation)).itemsize)
        flying: Callable[[], None] | None = None
        for turn, start in enumerate(range(0, len(data), num_inside * most)):
            chunk, side = data[start : start + num_inside * most], str(turn & 1)
            mine = self._total_inside(operation, watch, chunk, side)
            if turn == 0:
                agree()
            theirs = self._scratch.take("theirs" + side, len(mine), mine.dtype)
            work = self._gloo.start_swap(theirs, mine, watch.deadline_s)
            if flying is not None:
                flying()
            flying = functools.partial(self._land, operation, watch, work, mine, theirs, chunk)
        assert flying is not None
        flying()

    def _land(
        self,
        operation: Operation,
        watch: Watch,
        work: Any,
        mine: Flat,
        theirs: Flat,
        chunk: Flat,
    ) -> None:
        self._gloo.finish(watch, work)
        parts = [mine, theirs] if self._mine == 0 else [theirs, mine]
        reduce(mine, parts, summing_of(operation), wide_of(operation))
        self._gather_inside(operation, watch, mine, chunk)

    def _total_inside(self, operation: Operation, watch: Watch, data: Flat, side: str = "") -> Flat:
        """Reduce data across this host's ranks; return this rank's shard.

        The shard has the accumulation dtype. All shards have the same length, so the last one is
        padded with zeros.
        """
        num_inside = self._inside.members.size
        length, carried = -(-len(data) // num_inside), carried_of(operation)
        given = data
        if length * num_inside != len(data) or carried != data.dtype:
            given = self._scratch.take("given" + side, length * num_inside, carried)
            convert(operation.dtype, given[: len(data)], data)
            given[len(data) :] = 0
        total = self._scratch.take("total" + side, length, carried)
        self._inside.run(
            "reduce_scatter", given, total, operation, watch,
            dtype=wide_of(operation), reduce_op=summing_of(operation),
        )  # fmt: skip
        return total

    def _gather_inside(self, operation: Operation, watch: Watch, total: Flat, data: Flat) -> None:
        """Assemble the result in `data` from the shards of this host's ranks."""
        share = total
        if total.dtype != data.dtype:
            share = self._scratch.take("share", len(total), data.dtype)
        self._conclude(operation, share, total)
        num_padded = len(share) * self._inside.members.size
        whole = data
        if num_padded != len(data):
            whole = self._scratch.take("whole", num_padded, data.dtype)
        self._inside.run("all_gather", share, whole, operation, watch)
        if whole is not data:
            np.copyto(data, whole[: len(data)])

    def _conclude(self, operation: Operation, out: Flat, total: Flat) -> None:
        """Convert the reduced data to the result's dtype; for an average, divide the data first."""
        if operation.reduce_op == "avg":
            divide(total, self._size, wide_of(operation))
        convert(operation.dtype, out, total)

    def _reduce_scatter(self, operation: Operation, watch: Watch, agree: _Agree) -> None:
        assert self._across is not None
        source, target = array_of(operation.source), array_of(operation.target)
        num_inside, num_hosts = self._inside.members.size, len(self._hosts)
        carried, op = carried_of(operation), summing_of(operation)
        rows = source.reshape(self._size, len(target))
        given = self._scratch.take("given", len(source), carried)
        by_place = [ranks[place] for place in range(num_inside) for ranks in self._hosts]
        for row, rank in zip(given.reshape(rows.shape), by_place, strict=True):
            convert(operation.dtype, row, rows[rank])
        column = self._scratch.take("total", num_hosts * len(target), carried)
        self._inside.run(
            "reduce_scatter", given, column, operation, watch,
            dtype=wide_of(operation), reduce_op=op,
        )  # fmt: skip
        agree()
        total = self._scratch.take("share", len(target), carried)
        self._across.run(
            "reduce_scatter", column, total, operation, watch,
            dtype=wide_of(operation), reduce_op=op,
        )  # fmt: skip
        self._conclude(operation, target, total)

    def _all_gather(self, operation: Operation, watch: Watch, agree: _Agree) -> None:
        assert self._across is not None
        agree()
        source, target = array_of(operation.source), array_of(operation.target)
        num_inside, num_hosts = self._inside.members.size, len(self._hosts)
        column = self._scratch.take("share", num_hosts * len(source), source.dtype)
        self._across.run("all_gather", source, column, operation, watch)
        whole = self._scratch.take("whole", num_inside * len(column), source.dtype)
        self._inside.run("all_gather", column, whole, operation, watch)
        blocks = whole.reshape(num_inside, num_hosts, len(source))
        rows = target.reshape(self._size, len(source))
        for host, ranks in enumerate(self._hosts):
            for place, rank in enumerate(ranks):
                np.copyto(rows[rank], blocks[place, host])

    def _broadcast(self, operation: Operation, watch: Watch, agree: _Agree) -> None:
        assert self._across is not None
        agree()
        is_root = self._members.rank == operation.root
        data = array_of(operation.source if is_root else operation.target)
        host = next(i for i, ranks in enumerate(self._hosts) if operation.root in ranks)
        place = self._hosts[host].index(operation.root)
        if self._place == place:
            source, target = (data, None) if is_root else (None, data)
            self._across.run("broadcast", source, target, operation, watch, root=host)
        source, target = (data, None) if self._place == place else (None, data)
        self._inside.run("broadcast", source, target, operation, watch, root=place)

    # ---- messages ----

    def _spans_levels(self, operation: Operation) -> bool:
        """Return whether a receive accepts messages both from this host and from other hosts."""
        return operation.peer == ANY_SOURCE and 1 < len(self._hosts[self._mine]) < self._size

    def _submit_to_both(self, operation: Operation, watch: Watch) -> Pending:
        """Start a receive on both levels. The level between hosts checks the deadline."""
        engine: Any = self._inside.engine
        longer = dataclasses.replace(operation, timeout_s=operation.timeout_s + _LATER_S)
        inside = engine.submit_shared(longer, self._watch_inside(watch))
        across = self._flat.submit_beside(operation, watch, inside)
        return EitherPending(inside, across, self._hosts[self._mine])

    def _route(self, operation: Operation, watch: Watch) -> tuple[Engine, Operation, Watch]:
        """Return the engine for a message, with the operation and watch adapted to that engine."""
        near = self._hosts[self._mine]
        if operation.peer == ANY_SOURCE and len(near) == self._size:
            return self._inside.engine, operation, self._watch_inside(watch)
        if operation.peer not in near:
            return self._flat, operation, watch
        inside = dataclasses.replace(operation, peer=near.index(operation.peer))
        return self._inside.engine, inside, self._watch_inside(watch)

    def _watch_inside(self, watch: Watch) -> LevelWatch:
        return LevelWatch(watch, self._inside.places)
