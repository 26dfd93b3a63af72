"""Turn events into actions for the units of one group.

`Order` records the sequence in which forward passes request units, and uses this record to gather
the next units ahead of time. The record is the same on all ranks, so all ranks gather the same
units.

[Note: when a step fails] An exception can leave a unit's forward or backward pass unfinished. At
the unit's next forward pass, `Order` starts over: it waits for gathers in progress, releases all
units, and drops gradients that were not reduced. The program can then continue with
`optimizer.zero_grad()` and the next batch. After an error in a collective, however, the group is
unusable.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Iterable, Sequence

from echelon.dist.fsdp.order.actions import Abandon, Action, Trim
from echelon.dist.fsdp.order.budget import Budget
from echelon.dist.fsdp.order.entry import Entry, State
from echelon.dist.fsdp.order.memory import Reductions, Residency
from echelon.dist.fsdp.order.pending import Pending
from echelon.dist.fsdp.order.recording import Recording, begun_before_in, begun_in, ended_in
from echelon.dist.fsdp.order.run import Run, check_whole

Actions = list[Action]


class Order:
    """The order in which one group's units are gathered and reduced.

    Each event has a method, which returns the resulting actions.

    Attributes:
        budget: the memory budget.
    """

    def __init__(self, budget: Budget | None = None) -> None:
        self.budget = budget or Budget()
        self._residency = Residency(self.budget)
        self._entries: weakref.WeakValueDictionary[int, Entry] = weakref.WeakValueDictionary()
        self._num_entries = 0
        self._run: Run | None = None
        self._failed = False
        self._opened: list[weakref.ref[Entry]] = []
        self._pending = Pending()
        self._last_run: list[weakref.ref[Recording]] = []  # the recordings of the last backward
        self._final: weakref.ref[Entry] | None = None  # asked for last in the last forward of all
        self._clock = 0  # counts forwards that began or ended

    def add(self, entry: Entry) -> None:
        """Add a unit. Units must be added in the order of their numbers, starting at 0."""
        assert entry.number == self._num_entries, (entry.number, self._num_entries)
        self._num_entries += 1
        self._entries[entry.number] = entry

    @property
    def entries(self) -> list[Entry]:
        """The units that have not been garbage-collected, sorted by number."""
        found = list(self._entries.values())
        return sorted(found, key=lambda entry: entry.number)

    @property
    def in_backward(self) -> bool:
        """True while autograd is running through the units."""
        return self._run is not None and not self._failed

    def is_nested(self, entry: Entry) -> bool:
        """Return whether a unit's forward pass is running inside an outer unit's forward pass."""
        opened = self._open()
        return not self._failed and entry in opened and opened[0] is not entry

    def is_at_work(self, entry: Entry) -> bool:
        """Return whether a backward pass or this unit's forward pass is running."""
        return self.in_backward or (not self._failed and entry in self._open())

    # ---- forward ----

    def forward_begins(self, entry: Entry, *, records: bool, trains: bool) -> Actions:
        """Handle the beginning of a unit's forward pass.

        Args:
            records: whether autograd records the forward pass.
            trains: whether a backward pass can follow. Under reentrant activation checkpointing,
                this can be True even if `records` is False.
        """
        if self.in_backward:  # activations are computed again
            self._running().enters(entry)
            return self._residency.take()
        if self._failed or entry in self._open():
            self._start_over()
        self._opened.append(weakref.ref(entry))
        recording = self._recording()
        # A reentrant checkpoint runs forwards without gradients inside an outer unit's.
        if records or (trains and self._open()[0] in recording.begun):
            self._begin(entry, recording)
        for one in (*entry.borrowed, entry):
            self._ask(one, recording)
        return self._residency.take()

    def forward_ends(self, entry: Entry, *, has_graph: bool) -> Actions:
        """Handle the end of a unit's forward pass.

        Args:
            has_graph: whether the outputs of the forward pass have an autograd graph.
        """
        if self.in_backward:
            return []
        recording = self._recording(entry)
        self._close(entry)
        if has_graph:
            self._clock += 1
            entry.ended_at = self._clock
            recording.ended[entry] = None
            self._pending.add(recording, entry)
        at_end = not self._opened
        is_kept = has_graph and self._comes_first(entry, recording, at_end=at_end)
        if at_end:
            recording.end_forward()
            self._final = None if recording.final is None else weakref.ref(recording.final)
        if entry.reshard and not entry.held and not is_kept and not self._is_lent(entry):
            self._residency.release(entry, for_backward=has_graph)
        for owner in entry.borrowed:
            in_use = owner.held or owner in self._open() or self._is_lent(owner)
            if owner.reshard and not in_use:
                self._residency.release(owner, for_backward=has_graph)
        if at_end and not has_graph:
            self._residency.release_ahead()
            self._residency.emit(Trim())
        return self._residency.take()

    # ---- backward ----

    def backward_begins(self) -> Actions:
        """Handle the beginning of an autograd run."""
        assert not self.in_backward
        if self._failed:
            self._start_over()
        pending = self._pending.recordings()
        begun = begun_in(pending)
        is_again = not begun
        if is_again:
            pending = [one for ref in self._last_run if (one := ref()) is not None]
            begun = begun_before_in(pending)
        ended = [] if is_again else ended_in(pending)
        self._run = Run(self._residency, pending, ended, begun, is_again=is_again)
        return self._residency.take()

    def outputs_have_gradients(self, entry: Entry, call: int | None) -> Actions:
        """Handle the start of a unit's backward pass.

        Args:
            call: the number of the forward call, or None if the call is not tracked.
        """
        if call is not None:
            entry.begin_call(call)  # once more, if its graph was kept
        self._running().enters(entry)
        return self._residency.take()

    def gradient_arrives(self, entry: Entry, member: Hashable) -> Actions:
        """Handle a parameter's newly computed gradient.

        Raises:
            RuntimeError: the unit's parameters were not in memory, so the gradient is wrong.
        """
        self._running().arrived(entry, member)
        return self._residency.take()

    def inputs_have_gradients(self, entry: Entry, call: int) -> Actions:
        """Handle the end of the backward pass that belongs to a forward call of a unit.

        Raises:
            RuntimeError: the unit's parameters were not in memory, so the gradients are wrong.
        """
        check_whole(entry, "the gradient of an input")
        entry.end_call(call)
        # After a call whose inputs have no gradient, more of the unit's may be to come.
        self._running().look(entry, passed=not entry.is_unwatched)
        return self._residency.take()

    def backward_asks(self) -> list[int]:
        """Return this rank's votes on which recordings take part in the current backward pass.

        The list contains one number per recording. For each recording, the highest vote across all
        ranks wins. If no vote is necessary, the list is empty on all ranks.
        """
        run = self._running()
        return [] if run.yields_nothing else self._pending.words(run)

    def backward_ends(self, agreed: Sequence[int] = ()) -> Actions:
        """Handle the end of an autograd run.

        If `in_backward` is still True afterwards, `backward_completes` must be called next.

        Args:
            agreed: the maximum over all ranks of each vote from `backward_asks`.
        """
        run = self._running()
        if run.yields_nothing:
            run.keep_rest()
            self._run = None
            for entry in self.entries:
                entry.keep_calls()
        else:
            run.finish(self._pending.concerned(run, agreed))
        return self._residency.take()

    def backward_completes(self) -> Actions:
        """Complete the backward pass; release every unit that is not held (see `Entry.held`)."""
        run = self._running()
        if run.recordings:
            self._last_run = [weakref.ref(one) for one in run.recordings]
        self._pending.complete(run.recordings)
        self._run = None
        self._residency.clear()
        waiting = self._pending.entries()
        for entry in self.entries:
            if entry not in waiting:
                entry.forget_backward()
            if not entry.held:
                self._residency.release(entry)
        self._residency.emit(Trim())
        return self._residency.take()

    # ---- by hand ----

    def gather(self, entries: Iterable[Entry]) -> Actions:
        """Start gathering units at the program's request."""
        for entry in entries:
            if entry.state is not State.SHARDED and entry.facts.is_stale():
                self._residency.release(entry)
            self._residency.gather(entry)
        return self._residency.take()

    def hold(self, entries: Iterable[Entry]) -> Actions:
        """Gather units and hold them until the program releases them."""
        for entry in entries:
            self._residency.wait(entry)
            self._residency.note_use(entry)
            entry.held = True
        return self._residency.take()

    def release(self, entries: Iterable[Entry]) -> Actions:
        """Release units, including those that the program gathered with `hold`."""
        for entry in entries:
            entry.held = False
            self._residency.release(entry)
            self._pending.note_release(entry)
        return self._residency.take()

    def reduce(self, entries: Iterable[Entry]) -> Actions:
        """Reduce the units' gradients at the program's request."""
        reductions = Reductions(self._residency)
        for entry in entries:
            reductions.begin(entry)
        reductions.complete()
        return self._residency.take()

    # ---- failures ----

    def fail(self) -> None:
        """Handle a failed hook or action, or an interrupted backward pass."""
        self._failed = True
        self._run = None
        self._residency.clear()

    def _start_over(self) -> None:
        self._failed = False
        self._run = None
        self._opened = []
        self._pending = Pending()
        self._residency.clear()
        self._residency.emit(Trim(all_buffers=True))
        for entry in self.entries:
            self._residency.emit(Abandon(entry))
            entry.state, entry.held = State.SHARDED, False
            entry.forget_backward()
            if entry.recording is not None:
                entry.recording.forget()
        self._residency.emit(Trim())

    # ---- recording ----

    def _open(self) -> list[Entry]:
        """Return the units whose forward passes are running, outermost first."""
        return [entry for ref in self._opened if (entry := ref()) is not None]

    def _close(self, entry: Entry) -> None:
        opened = self._open()
        if entry in opened:
            opened = opened[: opened.index(entry)]
        self._opened = [weakref.ref(one) for one in opened]

    def _recording(self, entry: Entry | None = None) -> Recording:
        """Return the recording of the outermost unit whose forward pass is running.

        If no forward pass is running, the recording of `entry` is returned.
        """
        opened = self._open()
        outermost = opened[0] if opened else entry
        assert outermost is not None
        if outermost.recording is None:
            outermost.recording = Recording(outermost.number)
        return outermost.recording

    def _comes_first(self, entry: Entry, recording: Recording, *, at_end: bool) -> bool:
        """Return whether the backward pass is expected to begin with this unit.

        Outermost units without inner units often run one after another. For such a unit, the
        result is True only if the unit was also the last to run in the previous outermost forward
        pass.
        """
        if at_end and not entry.outer:
            return self._final is not None and entry is self._final()
        return at_end or entry is recording.final

    def _begin(self, entry: Entry, recording: Recording) -> None:
        if not entry.has_begun:
            self._clock += 1
            entry.has_begun, entry.place = True, self._clock
        recording.begun[entry] = None
        self._pending.add(recording, entry)

    def _ask(self, entry: Entry, recording: Recording) -> None:
        if entry.state is not State.SHARDED and entry.facts.is_stale():
            self._residency.release(entry)
        self._residency.gather(entry)
        recording.follow(entry)
        self._residency.gather_ahead(entry, recording.after(entry))
        self._residency.wait(entry)

    def _is_lent(self, entry: Entry) -> bool:
        """Return whether a running forward pass of another unit uses this unit's parameters."""
        return any(entry in running.borrowed for running in self._open())

    def _running(self) -> Run:
        assert self._run is not None, "a backward event outside a backward"
        return self._run
