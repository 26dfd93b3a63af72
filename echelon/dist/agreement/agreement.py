"""Make one rank's request take effect at the same step on every rank.

Ranks call `reached` once per step. Until a rank makes a request, the calls do not communicate. On
each rank, a background thread waits for the first request to appear in the store.

[Note: the call that all ranks agree on] Ranks can be several calls apart. When a thread receives a
request, it makes its rank's next call to `reached` block, and publishes the number of that call.
Once all ranks' numbers are known, the ranks choose the highest number, and the call with this
number returns True on all ranks. No rank can have passed this call, because every rank is blocked
at this call or an earlier one. A blocked rank waits only for the threads of other ranks, never for
their programs, so blocking a rank cannot cause a deadlock.

An all_reduce per step was rejected, because it would slow down every step and synchronize ranks
that are otherwise independent.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time

from echelon.dist.backends.interface import Members
from echelon.dist.errors import build
from echelon.dist.membership.board import quick
from echelon.dist.membership.meet import arrive, exchange
from echelon.dist.operation.operation import Operation
from echelon.dist.progress.group_state import GroupState
from echelon.errors import CollectiveError, CollectiveTimeoutError, StoreError, StoreTimeoutError
from echelon.recorder import span
from echelon.store import PrefixStore
from echelon.store.base import Store

_LISTEN_S = 30.0
_RETRY_S = 1.0
_LOOK_S = 0.5
_CLOSE_S = 0.5
_ANSWERED = "answered"


class Agreement:
    """One rank's handle to an agreement, created by `runtime.agree_on_calls`.

    Attributes:
        reason: the reason given in the first request; "" until the ranks have agreed on a call.
    """

    def __init__(
        self, members: Members, state: GroupState, store: Store, timeout_s: float, what: str
    ) -> None:
        """Start the thread that waits for requests.

        Args:
            members: the participating ranks.
            state: the state of the members' group. When the group is closed or aborted, the
                agreement ends as well.
            store: a view of the store whose keys are used only by this agreement.
            timeout_s: how long a call to `reached` waits for the threads of other ranks.
            what: the subject of the agreement, as shown in errors and spans.
        """
        self.reason = ""
        self._members = dataclasses.replace(members, check=self._check)
        self._state = state
        self._store = store
        self._timeout_s = timeout_s
        self._what = what
        self._wish: str | None = None  # set by signal handlers too: no lock
        self._lock = threading.Lock()  # of the four below; never taken by a signal handler
        self._round = 0
        self._num_answered = 0
        self._is_held = False
        self._chosen = -1
        self._error: Exception | None = None
        self._is_decided = threading.Event()
        self._is_passed = threading.Event()
        self._is_closed = False
        self._client: Store | None = None
        self._thread: threading.Thread | None = None
        if members.size > 1:
            self._listen_in_background()

    def ask(self, reason: str) -> None:
        """Request that all ranks agree on a later call to `reached`, which will return True.

        This method can be called from a signal handler.
        """
        self._wish = reason

    def reached(self) -> bool:
        """Count this call, and return whether it is the call on which the ranks agreed.

        Blocks only while the ranks are reaching an agreement. Every rank must call this method the
        same number of times. The first call after `ask` publishes the request.

        Raises:
            CollectiveTimeoutError: some ranks did not take part within the timeout; the error names
                them.
            PeerLostError: a rank has died.
            StoreError: the request cannot be published.
        """
        if self._wish is not None and not self._is_held:
            self._publish(self._wish)
        with self._lock:
            if not self._is_held:
                self._num_answered += 1
                return False
        return self._answer()

    @property
    def is_closed(self) -> bool:
        """True once the agreement is closed, for example because this rank has left its groups."""
        return self._is_closed

    def unanswered(self) -> str:
        """Return a pending request, or "" if no request is pending.

        This rank's own request takes precedence over another rank's. The method can also be called
        after `close`.

        Raises:
            StoreError: the store does not answer.
        """
        if self._wish is not None:
            return self._wish
        key = f"{self._round}/asked"
        return self._store.get(key).decode(errors="replace") if self._store.check([key]) else ""

    def close(self) -> None:
        """Stop the thread. Calling this twice is safe.

        Ranks that make a request later can still read how many calls this rank made.
        """
        if not self._is_closed and self._members.size > 1:
            self._leave()
        self._is_closed = True
        self._is_passed.set()
        client, self._client = self._client, None
        if client is not None:
            client.close()
        thread, self._thread = self._thread, None
        if thread is not None and thread is not threading.current_thread():
            thread.join(_CLOSE_S)

    # ---- the program's thread ----

    def _publish(self, wish: str) -> None:
        if self._members.size == 1:
            with self._lock:
                self._is_held, self._chosen, self.reason = True, self._num_answered, wish
            self._is_decided.set()
            return
        with self._lock:
            self._is_held = True
        self._store.compare_set(f"{self._round}/asked", "", wish)

    def _answer(self) -> bool:
        if not self._is_decided.is_set():
            with span("store", f"agree on {self._what}"):
                self._wait()
        if self._error is not None:
            raise self._error
        with self._lock:
            self._num_answered += 1
            if self._num_answered <= self._chosen:
                return False
            self._round += 1
            self._is_held = False
            self._wish = None
            self._is_decided.clear()
        self._is_passed.set()
        return True

    def _wait(self) -> None:
        deadline_s = time.monotonic() + self._timeout_s + _RETRY_S
        while not self._is_decided.wait(_LOOK_S):
            if self._is_closed or time.monotonic() > deadline_s:
                self._fail(CollectiveError(f"no agreement on {self._what}: this rank has left"))

    def _leave(self) -> None:
        """Before this rank leaves, publish its number of calls, so that other ranks can agree."""
        with self._lock:
            is_left = not self._is_held and self._state.error is None
            self._is_held = True
        if not is_left:
            return
        with contextlib.suppress(StoreError), contextlib.closing(quick(self._store)) as store:
            arrive(self._members, self._round_of(store), _ANSWERED, self._num_answered)

    def _round_of(self, store: Store) -> PrefixStore:
        return PrefixStore(str(self._round), store)

    # ---- the listening thread ----

    def _listen_in_background(self) -> None:
        self._client = self._store.clone()
        self._client.observer = None  # it waits for most of the job's life: that explains no hang
        self._thread = threading.Thread(
            target=self._listen, args=(self._client,), name="echelon-agreement", daemon=True
        )
        self._thread.start()

    def _listen(self, client: Store) -> None:
        while not self._is_closed:
            try:
                wish = client.get(f"{self._round}/asked", timeout=_LISTEN_S)
            except StoreTimeoutError:
                continue
            except StoreError:
                if not self._is_closed:
                    self._is_passed.wait(_RETRY_S)
                continue
            if not self._decide(client, wish.decode(errors="replace")):
                return
            self._is_passed.wait()
            self._is_passed.clear()

    def _decide(self, client: Store, wish: str) -> bool:
        """Block calls to `reached` while the ranks exchange call numbers and agree on one."""
        with self._lock:
            if self._is_closed:
                return False
            self._is_held = True
            answered = self._num_answered
        deadline_s = time.monotonic() + self._timeout_s
        members, store = self._members, self._round_of(client)
        try:
            counts = exchange(members, store, _ANSWERED, answered, deadline_s)
        except CollectiveTimeoutError as err:
            missing = ", ".join(map(str, err.ranks))
            self._fail(
                CollectiveTimeoutError(
                    f"the ranks did not agree on {self._what} within {self._timeout_s:.1f} s "
                    f"(missing: {missing}). Every rank must make this call once per step",
                    group=self._members.name, operation="agreement", ranks=err.ranks,
                )
            )  # fmt: skip
        except Exception as err:  # noqa: BLE001 -- the program's thread raises it
            self._fail(err)
        else:
            self._chosen = max(counts)
            self.reason = wish
            self._is_decided.set()
        return self._error is None

    def _fail(self, error: Exception) -> None:
        self._error = error
        self._is_decided.set()

    def _check(self) -> None:
        """Raise an error if the ranks can no longer agree.

        Raises:
            CollectiveError: the group has ended.
            PeerLostError: a rank died before publishing its call number; the error names the rank.
        """
        operation = Operation("agreement", self._round)
        self._state.check_end(operation)
        others = [rank for rank in range(self._members.size) if rank != self._members.rank]
        store = self._round_of(self._store)
        dead = [
            rank
            for rank in self._state.evidence.dead(others)
            if not store.check([f"{_ANSWERED}/{rank}"])
        ]
        if dead:
            raise build.peer_lost(self._members, operation, dead)
