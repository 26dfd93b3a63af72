"""Determine which members of a group are at fault: dead, departed, late or blamed by another rank.

Evidence, strongest first:

1. The death of a process on this host, detected directly (`peers`).
2. A verdict published by another rank. The first verdict is final, and all ranks report it.
3. The mark that a rank stored when it closed the group properly.
4. The lack of an answer to the liveness check.

Every rank's process answers the check on a separate thread, so a rank that is still computing is
considered late, never dead. The answer contains the number of collectives that the rank has called.
The answer also reports what the rank is waiting for, so that a waiting rank is not blamed for
another rank's fault.

Connections and store leases are not evidence: the connection of a stopped rank stays open, a live
rank can lose its connection, and a lease can be out of date by as much as its duration (10 s by
default).

A rank that does not answer is reported as silent, and is blamed only if no rank is known to be
dead. If the store does not answer, the error reports this and does not blame any rank. Every store
call in this module has a short timeout (`board.QUICK_S`).
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from echelon.dist.backends.interface import ConnectionBroken, Members
from echelon.dist.errors import build
from echelon.dist.membership.answer import Answer, answer_of, origins, read
from echelon.dist.membership.board import QUICK_S, Board, path_of, quick
from echelon.dist.membership.host import processes_here
from echelon.dist.membership.peers import Peers
from echelon.dist.operation.operation import Operation
from echelon.dist.progress.watcher import watcher
from echelon.errors import (
    CollectiveError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    PeerLostError,
    StoreError,
    StoreTimeoutError,
)
from echelon.recorder.continuation import EVERY_GROUP
from echelon.store import PrefixStore
from echelon.store.base import Store

if TYPE_CHECKING:
    from echelon.dist.progress.group_state import GroupState

_ANSWER_S = 1.5
_STORE_STALL_S = 1.5  # for how long a store that does not answer is asked again
_ASK_AGAIN_S = 0.05
_OTHERS_ASK_S = 0.4  # before a question of another rank is asked again
_VERDICT_S = 2.75  # in which a rank that asks the others has its verdict
_HEARSAY_S = 0.25  # a verdict may be on its way when a connection breaks or a process ends
_CLASSES: dict[str, type[CollectiveError]] = {
    "timeout": CollectiveTimeoutError,
    "lost": PeerLostError,
    "mismatch": CollectiveMismatchError,
    "error": CollectiveError,
}


class Liveness:
    """The evidence that this rank has about a group; see `progress.evidence.Evidence`."""

    def __init__(
        self, members: Members, store: PrefixStore, board: Board, facts: list[dict[str, Any]]
    ) -> None:
        """Start watching the members.

        Args:
            store: the group's view of the store.
            board: the world's board, which is used if a member cannot be watched directly.
            facts: for each group rank, the `process_identity` of its process.
        """
        self._members = members
        self._store = store
        self._path = path_of(store)
        self._others = [rank for rank in range(members.size) if rank != members.rank]
        self._peers = Peers(processes_here(facts, members.rank))
        self._world_board = board
        self._board = board if self._peers.watched != set(self._others) else None
        self._state: GroupState | None = None
        self._has_heard = False  # of a verdict: it needs no other
        self._asking: Store | None = None  # the connection on which this rank looks for the cause
        self._num_monitored = 0
        self._arrivals = ""  # where ranks of the monitored barrier under way leave their marks
        self._is_closed = False

    def use_board(self) -> None:
        """Use the world's liveness board even if all members are watched directly.

        This method must be called before `serve`.
        """
        if self._others:
            self._board = self._world_board

    def serve(self, state: GroupState) -> None:
        """Start answering liveness checks, and applying the verdicts of other ranks to `state`."""
        self._state = state
        if self._board is not None:
            self._board.attach(self._path, self._take)

    def check_joining(self) -> None:
        """While the group is being created, raise an error if a member is known to have died.

        Raises:
            PeerLostError: a member has died; the error names it.
        """
        dead = self._peers.dead(self._others)
        if dead:
            raise build.peer_lost(self._members, Operation("init", 0), dead)

    # ---- what GroupState asks ----

    def dead(self, ranks: Sequence[int]) -> list[int]:
        """Return the given group ranks whose processes are known to have ended."""
        return self._peers.dead(ranks)

    def find(
        self,
        operation: Operation,
        broken: ConnectionBroken | None,
        needed: Sequence[int] | None,
        dead: Sequence[int] = (),
    ) -> CollectiveError:
        """Return the error for a failed operation, naming the ranks at fault if they can be found.

        The method takes at most 2.5 s, or 4 s if the store is slow. If the store does not answer,
        calls are retried for 1.5 s, because the store's machine might have been paused.
        """
        members = self._members
        if broken is None and needed is not None and not dead and self._board is None:
            return build.timed_out(members, operation, needed)
        limit_s = time.monotonic() + _STORE_STALL_S
        was_cut_off = False
        while True:
            try:
                with contextlib.closing(quick(self._store)) as store:
                    self._asking = store
                    return self._find(operation, broken, needed, dead, store)
            except StoreError as err:
                if self._has_heard and not was_cut_off:
                    was_cut_off = True
                    continue  # cut off by the arrival of a verdict, which the next look finds
                gone = self._peers.dead(self._others)
                if gone:
                    return build.peer_lost(members, operation, gone)
                if broken is None and needed is not None:
                    return build.timed_out(members, operation, needed)
                if time.monotonic() >= limit_s:
                    return build.out_of_reach(members, operation, broken, err)
                time.sleep(_ASK_AGAIN_S)

    def explain(self, operation: Operation, error: CollectiveError) -> CollectiveError:
        """Return a more precise error for a failed operation if one is known, otherwise `error`."""
        if self._is_of_a_part(operation, error):
            return self.find(operation, None, [operation.peer])
        if self._is_late_here(operation, error):
            return self._late_here(operation, error)
        if not isinstance(error, PeerLostError):
            return error
        places = {rank: place for place, rank in enumerate(self._members.ranks)}
        blamed = [places[rank] for rank in error.ranks if rank in places]
        if blamed and self._peers.dead(blamed) == blamed:
            return error
        return self._heard_or(operation, error, _HEARSAY_S)

    def hear(self, operation: Operation, error: CollectiveError) -> CollectiveError:
        """Return the verdict published by the rank whose failure ended this rank's operation.

        If no verdict is received in time, return `error`.
        """
        wait_s = _HEARSAY_S if self._board is None else _VERDICT_S
        return self._heard_or(operation, error, wait_s)

    def _heard_or(
        self, operation: Operation, error: CollectiveError, wait_s: float
    ) -> CollectiveError:
        try:
            with contextlib.closing(quick(self._store)) as store:
                return self._verdict(operation, store, wait_s) or error
        except StoreError:
            return error

    def _is_of_a_part(self, operation: Operation, error: CollectiveError) -> bool:
        """Return whether a send or receive timed out in an engine that serves only some members."""
        return (
            isinstance(error, CollectiveTimeoutError)
            and self._board is not None
            and operation.peer in self._others
            and not str(error).startswith(build.place(self._members, operation))
        )

    @contextlib.contextmanager
    def arriving(self) -> Iterator[None]:
        """Mark this rank in the store as having arrived at a monitored barrier.

        The mark is removed when the block ends, unless the block raises an exception. The mark
        remains valid even if the rank can no longer answer a liveness check. If the store does not
        answer, no mark is set. Ranks that share memory do not need marks, because the memory shows
        which ranks have arrived.
        """
        if self._board is None:
            yield
            return
        arrivals = f"arrived/{self._num_monitored}"
        self._num_monitored += 1
        mark = f"{arrivals}/{self._members.rank}"
        self._try(lambda store: store.set_confirmed(mark, b"1"))
        self._arrivals = arrivals
        try:
            yield
        finally:
            self._arrivals = ""
        self._try(lambda store: store.delete_key(mark))  # after a failure others may read it

    def _try(self, ask: Callable[[Store], object]) -> None:
        """Call the store with a short timeout; do nothing if the store does not answer."""
        with contextlib.suppress(StoreError), contextlib.closing(quick(self._store)) as store:
            ask(store)

    def publish(self, error: CollectiveError) -> None:
        """Publish, on the watcher's thread, why the group ended on this rank."""
        if self._others and not self._has_heard:
            note = self._note(error)
            watcher().post(lambda: self._publish(note))

    def leave(self) -> None:
        """Publish, on the watcher's thread, that this rank closed the group."""
        if self._board is not None:
            watcher().post(self._mark_left)

    def close(self, timeout_s: float = 2 * QUICK_S) -> None:
        """Publish everything that is still pending, then release all resources.

        Safe to call twice.
        """
        if self._is_closed:
            return
        self._is_closed = True
        watcher().flush(timeout_s)
        if self._board is not None:
            self._board.detach(self._path)
        self._peers.close()

    # ---- finding out ----

    def _find(
        self,
        operation: Operation,
        broken: ConnectionBroken | None,
        needed: Sequence[int] | None,
        dead: Sequence[int],
        store: Store,
    ) -> CollectiveError:
        members = self._members
        known = self._verdict(operation, store, _HEARSAY_S)
        if known is not None:
            return known
        gone = list(dead) or (self._peers.dead(self._others) if needed is None else [])
        if gone:
            return build.peer_lost(members, operation, gone)
        answers, silent = self._ask(operation, store)
        known = self._verdict(operation, store, 0.001)
        if known is not None:
            return known
        left = [rank for rank in silent if store.check([f"left/{rank}"])]
        gone = sorted({*self._peers.dead(self._others if needed is None else needed), *left})
        silent = [rank for rank in silent if rank not in gone]
        if gone:
            return build.peer_lost(members, operation, gone, silent=silent)
        if broken is None:
            late = self._late(operation, answers, silent) if needed is None else list(needed)
            late = self._without_arrived(operation, late, store)
            between: list[int] = []
            if operation.is_message and self._state is not None:
                answers[members.rank] = read(answer_of(self._state))
                late, between = origins(members.rank, late, answers, silent)
            mute = [rank for rank in silent if rank in late]
            return build.timed_out(members, operation, late, silent=mute, between=between)
        if silent:
            return build.peer_lost(members, operation, silent)
        seen = [] if broken.peer is None else [broken.peer]
        return build.connection_broken(members, operation, broken, seen)

    def _is_late_here(self, operation: Operation, error: CollectiveError) -> bool:
        """Return whether a send or receive timed out in a group whose ranks share this host."""
        return (
            isinstance(error, CollectiveTimeoutError)
            and self._board is None
            and operation.is_message
            and operation.peer in self._others
        )

    def _late_here(self, operation: Operation, error: CollectiveError) -> CollectiveError:
        """Return an error that names the rank at the end of the chain of waits.

        This method is used if all members share this host. The ranks in a chain time out at nearly
        the same time and publish what they were waiting for. If the store does not answer, return
        `error` unchanged.
        """
        if self._state is None:
            return error
        try:
            with contextlib.closing(quick(self._store)) as store:
                return self._follow(operation, error, answer_of(self._state), store)
        except StoreError:
            return error

    def _follow(
        self, operation: Operation, error: CollectiveError, mine: str, store: Store
    ) -> CollectiveError:
        me, limit_s = self._members.rank, time.monotonic() + _ANSWER_S
        store.set_confirmed(f"waits/{me}", mine)
        answers = {me: read(mine)}
        while True:
            known = self._verdict(operation, store, _ASK_AGAIN_S)
            if known is not None:
                return known
            late, between = origins(me, [operation.peer], answers, ())
            if time.monotonic() >= limit_s:
                chain = build.timed_out(self._members, operation, late, between=between)
                return chain if between else error
            for rank in late:
                if rank not in answers and store.check([f"waits/{rank}"]):
                    answers[rank] = read(store.get(f"waits/{rank}"))

    def _late(
        self, operation: Operation, answers: dict[int, Answer], silent: list[int]
    ) -> list[int]:
        if operation.is_message:
            return [operation.peer] if operation.peer in self._others else []
        late = [rank for rank, one in answers.items() if one.num_called <= operation.sequence]
        return sorted({*late, *silent})

    def _without_arrived(self, operation: Operation, late: list[int], store: Store) -> list[int]:
        """Return `late` without the ranks that have marked their arrival at a monitored barrier."""
        if operation.kind != "barrier" or not self._arrivals:
            return late
        return [rank for rank in late if not store.check([f"{self._arrivals}/{rank}"])]

    def _ask(self, operation: Operation, store: Store) -> tuple[dict[int, Answer], list[int]]:
        """Run a liveness check; return the answers and the ranks that did not answer."""
        if self._board is None:
            return {}, []
        question = f"{operation.kind}-{operation.peer}-{operation.sequence}"
        me = str(self._members.rank)
        is_first = store.compare_set(f"asked/{question}", "", me) == me.encode()
        silent = self._others if is_first else self._silent(question, store, _OTHERS_ASK_S)
        if silent:
            self._board.post(self._path, {"ask": question})
            silent = self._silent(question, store, _ANSWER_S)
        heard = [rank for rank in self._others if rank not in silent]
        if not heard:
            return {}, silent
        values = store.multi_get([self._answer_key(question, rank) for rank in heard])
        return {rank: read(value) for rank, value in zip(heard, values, strict=True)}, silent

    def _silent(self, question: str, store: Store, wait_s: float) -> list[int]:
        """Wait for answers to a liveness check; return the ranks that did not answer in time."""
        keys = {self._answer_key(question, rank): rank for rank in self._others}
        try:
            store.wait(list(keys), timeout=wait_s)
        except StoreTimeoutError as err:
            if not err.missing:
                raise
            names = [str(key).removeprefix(self._path) for key in err.missing]
            return sorted(keys[name] for name in names if name in keys)
        return []

    def _answer_key(self, question: str, rank: int) -> str:
        return f"answer/{question}/{rank}"

    # ---- verdicts and answers ----

    def _take(self, notice: dict[str, Any]) -> None:
        """Answer a question from the board, or apply a verdict. Runs on the board's thread."""
        state = self._state
        if state is None:
            return
        if "ask" in notice:
            with contextlib.closing(quick(self._store)) as store:
                key = self._answer_key(notice["ask"], self._members.rank)
                store.set_confirmed(key, answer_of(state))
        elif self._concerns_this_rank(notice):
            operation = Operation(notice["operation"], notice["sequence"])
            state.hear(self._reported(operation, notice))
            asking = self._asking
            if asking is not None:  # a dead rank would not answer until the time is over
                asking.close()

    def _concerns_this_rank(self, notice: dict[str, Any]) -> bool:
        """Return whether a verdict comes from another rank and concerns this group."""
        ranks = self._members.ranks
        if notice["group"] == EVERY_GROUP and not set(notice["ranks"]) & set(ranks):
            return False
        return bool(notice["by"] != ranks[self._members.rank])

    def _note(self, error: CollectiveError) -> dict[str, Any]:
        kind = next(name for name, one in _CLASSES.items() if isinstance(error, one))
        text = str(error).partition(" ranks): ")[2] or str(error).partition(" ranks) ")[2]
        return {
            "class": "lost" if error.operation == "abort" else kind,
            "ranks": list(error.ranks),
            "text": text or str(error),
            "operation": error.operation,
            "sequence": error.sequence,
            "by": self._members.ranks[self._members.rank],
        }

    def _publish(self, note: dict[str, Any]) -> None:
        with contextlib.closing(quick(self._store)) as store:
            store.compare_set("end", "", json.dumps(note))
        if self._board is not None:
            self._board.post(self._path, note)

    def _mark_left(self) -> None:
        with contextlib.closing(quick(self._store)) as store:
            store.set_confirmed(f"left/{self._members.rank}", b"1")

    def _verdict(self, operation: Operation, store: Store, wait_s: float) -> CollectiveError | None:
        """Wait briefly for a published verdict; return it as an error, or None if there is none.

        Raises:
            StoreError: the store does not answer.
        """
        try:
            text = store.get("end", timeout=wait_s)
        except StoreTimeoutError as err:
            # A loaded store may answer later than a short wait: ask again before it counts as gone.
            if err.missing or not store.check(["end"]):
                return None
            text = store.get("end")
        try:
            note = json.loads(text)
        except ValueError:
            return None
        return self._reported(operation, note)

    def _reported(self, operation: Operation, note: dict[str, Any]) -> CollectiveError:
        text = str(note["text"])
        same = (note["operation"], note["sequence"]) == (operation.kind, operation.sequence)
        if not same and note["operation"] != "abort":
            text = f"the group ended in {note['operation']} #{note['sequence']}: {text}"
        self._has_heard = True
        return build.reported(
            self._members, operation, _CLASSES[note["class"]], text, note["ranks"]
        )
