"""Order: from events to actions.

It records in which order forwards ask for units, and asks for the next ones ahead of time, to a
depth and within a budget. What is gathered ahead depends on these records alone, so that all ranks
do the same.

[Note: when a step fails]
An exception leaves forwards that began and did not end, or a backward that never reached its end.
The next forward of such a unit finds that, and the order starts over: gathers under way are waited
for (the other ranks started them too), everything is released, and gradients that were not reduced
are dropped. The program continues with `optimizer.zero_grad()` and the next batch. After an error
of a collective the group itself is unusable, and says so.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable

from echelon.dist.fsdp.order.actions import Abandon, Action, Trim
from echelon.dist.fsdp.order.budget import Budget
from echelon.dist.fsdp.order.entry import Entry, State
from echelon.dist.fsdp.order.memory import Reductions, Residency
from echelon.dist.fsdp.order.run import Run, check_whole

Actions = list[Action]


class Order:
    """The units of one group. Each method is an event; it returns what is to be done.

    Attributes:
        entries: the units, by number.
        budget: of memory.
    """

    def __init__(self, budget: Budget | None = None) -> None:
        self.budget = budget or Budget()
        self._residency = Residency(self.budget)
        self.entries = self._residency.entries
        self._run: Run | None = None
        self._failed = False
        self._open: list[Entry] = []  # units whose forwards are running, the outermost first
        self._last: Entry | None = None  # the one that was asked for last in this forward
        self._next: dict[Entry, Entry] = {}  # as recorded in the last forward
        self._final: Entry | None = None  # asked for last: its backward begins first
        self._place: dict[Entry, int] = {}
        self._ended: list[Entry] = []
        self._begun: dict[Entry, None] = {}
        self._begun_before: list[Entry] = []  # of the last backward

    def add(self, entry: Entry) -> None:
        """Take a unit in; its number must be the next one."""
        assert entry.number == len(self.entries), (entry.number, len(self.entries))
        self.entries.append(entry)

    @property
    def in_backward(self) -> bool:
        """Whether autograd is running through the units."""
        return self._run is not None and not self._failed

    def is_nested(self, entry: Entry) -> bool:
        """Return whether a unit's forward is running inside an outer unit's."""
        return not self._failed and entry in self._open and self._open[0] is not entry

    # ---- forward ----

    def forward_begins(self, entry: Entry, *, records: bool, trains: bool) -> Actions:
        """A unit's forward begins.

        Args:
            records: autograd records it.
            trains: a backward may follow; under a reentrant checkpoint one does without `records`.
        """
        if self.in_backward:  # activations are computed again
            self._running().enters(entry)
            return self._residency.take()
        if self._failed or entry in self._open:
            self._start_over()
        self._open.append(entry)
        # A reentrant checkpoint runs forwards without gradients inside an outer unit's.
        trains = records or (trains and self._open[0] in self._begun)
        if trains and entry not in self._begun:
            self._place[entry] = len(self._begun)
            self._begun[entry] = None
        for one in (*entry.borrowed, entry):
            self._ask(one)
        return self._residency.take()

    def forward_ends(self, entry: Entry, *, has_graph: bool) -> Actions:
        """A unit's forward ends; `has_graph`: a backward will reach its outputs."""
        if self.in_backward:
            return []
        if entry in self._open:
            del self._open[self._open.index(entry) :]
        if has_graph:
            if entry in self._ended:
                self._ended.remove(entry)
            self._ended.append(entry)
        at_end = not self._open
        is_kept = has_graph and (entry is self._final or (entry.outer and at_end))
        if at_end:
            self._final, self._last = self._last, None
        if entry.reshard and not entry.held and not is_kept and not self._is_lent(entry):
            self._residency.release(entry, for_backward=has_graph)
        for owner in entry.borrowed:
            in_use = owner.held or owner in self._open or self._is_lent(owner)
            if owner.reshard and not in_use:
                self._residency.release(owner, for_backward=has_graph)
        if at_end and not has_graph:
            self._residency.release_ahead()
            self._residency.emit(Trim())
        return self._residency.take()

    # ---- backward ----

    def backward_begins(self) -> Actions:
        """Autograd reached the first unit of a run that has none yet."""
        assert not self.in_backward
        if self._failed:
            self._start_over()
        begun = list(self._begun) or self._begun_before
        self._run = Run(
            self._residency, self._ended, begun, self._place_of, is_again=not self._begun
        )
        self._begun_before = begun
        self._ended, self._begun, self._last = [], {}, None
        return self._residency.take()

    def outputs_have_gradients(self, entry: Entry, call: int | None) -> Actions:
        """Autograd is about to go through a unit; `call`: the forward call; None: not followed."""
        if call is not None:
            entry.begin_call(call)  # once more, if its graph was kept
        self._running().enters(entry)
        return self._residency.take()

    def gradient_arrives(self, entry: Entry, member: Hashable) -> Actions:
        """Autograd finished the gradient of a parameter.

        Raises:
            RuntimeError: the unit's parameters were not in memory, so the gradient is wrong.
        """
        self._running().arrived(entry, member)
        return self._residency.take()

    def inputs_have_gradients(self, entry: Entry, call: int) -> Actions:
        """Autograd went through a forward call of a unit.

        Raises:
            RuntimeError: as `gradient_arrives`.
        """
        check_whole(entry, "the gradient of an input")
        entry.end_call(call)
        # After a call whose inputs have no gradient, more of the unit's may be to come.
        self._running().look(entry, passed=not entry.is_unwatched)
        return self._residency.take()

    def backward_ends(self) -> Actions:
        """Autograd ended. `backward_completes` is to follow if the run is over then."""
        run = self._running()
        if run.yields_nothing:
            ended, begun = run.left()
            self._ended = ended + [entry for entry in self._ended if entry not in ended]
            self._begun = dict.fromkeys([*begun, *self._begun])
            self._run = None
            for entry in self.entries:
                entry.keep_calls()
        else:
            run.finish()
        return self._residency.take()

    def backward_completes(self) -> Actions:
        """All gradients are reduced: release what the program does not hold."""
        self._run = None
        self._residency.clear()
        for entry in self.entries:
            entry.forget_backward()
            if not entry.held:
                self._residency.release(entry)
        self._residency.emit(Trim())
        return self._residency.take()

    # ---- by hand ----

    def gather(self, entries: Iterable[Entry]) -> Actions:
        """The program wants units whole: begin to gather them."""
        for entry in entries:
            if entry.state is not State.SHARDED and entry.facts.is_stale():
                self._residency.release(entry)
            self._residency.gather(entry)
        return self._residency.take()

    def hold(self, entries: Iterable[Entry]) -> Actions:
        """The program wants units whole until it releases them."""
        for entry in entries:
            self._residency.wait(entry)
            self._residency.note_use(entry)
            entry.held = True
        return self._residency.take()

    def release(self, entries: Iterable[Entry]) -> Actions:
        """Release units; those held are held no longer."""
        for entry in entries:
            entry.held = False
            self._residency.release(entry)
        return self._residency.take()

    def reduce(self, entries: Iterable[Entry]) -> Actions:
        """The program wants gradients reduced, whatever backward did."""
        reductions = Reductions(self._residency)
        for entry in entries:
            reductions.begin(entry)
        reductions.complete()
        return self._residency.take()

    # ---- failures ----

    def fail(self) -> None:
        """A hook or an action raised, or autograd stopped: the next forward starts over."""
        self._failed = True
        self._residency.clear()

    def _start_over(self) -> None:
        self._failed = False
        self._run = None
        self._open, self._ended, self._begun, self._last = [], [], {}, None
        self._residency.clear()
        self._residency.emit(Trim(all_buffers=True))
        for entry in self.entries:
            self._residency.emit(Abandon(entry))
            entry.state, entry.held = State.SHARDED, False
            entry.forget_backward()
        self._residency.emit(Trim())

    # ---- recording ----

    def _ask(self, entry: Entry) -> None:
        if entry.state is not State.SHARDED and entry.facts.is_stale():
            self._residency.release(entry)
        self._residency.gather(entry)
        if self._last is not None and self._last is not entry:
            self._next[self._last] = entry
        self._last = entry
        self._residency.gather_ahead(entry, self._following(entry))
        self._residency.wait(entry)

    def _following(self, entry: Entry) -> list[Entry]:
        following: list[Entry] = []
        depth = entry.depth
        while len(following) < depth and (due := self._next.get(entry)) is not None:
            following.append(due)
            entry = due
        return following

    def _is_lent(self, entry: Entry) -> bool:
        """Whether a forward that is running uses parameters of a unit beside the unit's own."""
        return any(entry in running.borrowed for running in self._open)

    def _place_of(self, entry: Entry) -> int:
        return self._place.get(entry, -1)

    def _running(self) -> Run:
        assert self._run is not None, "an event of backward outside of one"
        return self._run
