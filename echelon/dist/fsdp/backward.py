"""Backward: one run of autograd through sharded units.

It is alive as long as autograd's engine runs: the engine holds it by the callback that ends it. If
an exception stops the engine, the callback is dropped, this object with it, and the driver sees
that the step died.

Two orders, both known before it begins, keep the ranks in step whatever their data does:

* units are gathered in the reverse of the order in which their forwards *ended*. Asking for one
  gathers those before it, too;
* gradients are reduced in the reverse of the order in which forwards *began* (an outer unit begins
  first and has its last gradient last). One that is ready waits for those before it.

A unit's parameters are released once all its gradients are computed, or those of its inputs, which
autograd computes after everything inside. A unit with frozen parameters whose inputs need no
gradients is released at the end of the run: its last trained gradient says nothing about them.
A run without a single gradient for a parameter (inputs' gradients only, the first half of a split
backward) releases and reduces nothing: the weights' gradients are still to come, and may need the
parameters.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from echelon.dist.fsdp.flat import Member
from echelon.dist.fsdp.reducer import Reducer
from echelon.dist.fsdp.unit import State, Unit

if TYPE_CHECKING:
    from echelon.dist.fsdp.driver import Driver


class Backward:
    """One run.

    Args:
        ended, begun: forwards since the last backward, in these orders.
        is_again: there were none, so this run goes through graphs that were kept; `begun` is then
            that of the last backward, and those that this run does not reach are left out.
    """

    def __init__(
        self, driver: Driver, ended: list[Unit], begun: Iterable[Unit], *, is_again: bool
    ) -> None:
        self._driver = driver
        self._is_again = is_again
        self._to_gather = ended[::-1]
        self._expected = [unit for unit in reversed(list(begun)) if unit.trains]
        self._over: set[Unit] = set()
        self._entered: set[Unit] = set()  # units whose outputs have their gradients
        self._any_arrived = False
        self._reducer = Reducer(driver)

    def enters(self, unit: Unit) -> None:
        """Gather what autograd needs to go through a unit, which it is about to do."""
        for one in (*unit.borrowed, unit):
            self._entered.add(one)
            self.needs(one)

    def needs(self, unit: Unit) -> None:
        """Ensure that a unit's parameters are gathered."""
        if unit in self._to_gather:
            place = self._to_gather.index(unit)
            for due in self._to_gather[: place + 1]:
                self._driver.start_gather(due)
            del self._to_gather[: place + 1]
        self._driver.start_gather(unit)
        self._driver.start_ahead(unit, self._to_gather)
        unit.wait()
        if unit.trains and unit not in self._expected and unit not in self._over:
            self._expect(unit)

    def arrived(self, unit: Unit, member: Member) -> None:
        """Take the gradient that autograd finished for a parameter.

        Raises:
            RuntimeError: the unit's parameters were not there, so the gradient cannot be right.
        """
        check_whole(unit, f"the gradient of {member.name!r}")
        self._any_arrived = True
        if unit in self._over:  # again, through another graph
            self._over.discard(unit)
            unit.missing = None
            if unit not in self._expected:
                self._expect(unit)
        unit.awaits().discard(member)
        if unit.sync and not unit.held:
            self._reducer.collect(member)
        else:
            member.set_aside()
        self.look(unit, passed=False)

    def look(self, unit: Unit, *, passed: bool) -> None:
        """See whether a unit's backward is over; `passed`: its inputs have their gradients."""
        if unit.calls or self._is_lent(unit) or not self._is_complete(unit, passed=passed):
            return
        self._over.add(unit)
        # Frozen parameters have no gradient that tells when the last use of them is over.
        if not unit.held and not (unit.is_unwatched and unit.has_frozen):
            unit.release()
        self._reduce_ready()
        for owner in unit.borrowed:
            if owner not in self._over:
                self.look(owner, passed=not owner.is_unwatched)

    def _is_complete(self, unit: Unit, *, passed: bool) -> bool:
        """Whether no gradient of a unit's parameters is still to be computed."""
        if not passed and unit.borrowed:
            return False  # what it borrowed is not among what it awaits
        # A run that yields no gradient at all computes those of inputs only. Which parameters of
        # this unit got one may differ between ranks, so that must not decide.
        return not unit.awaits() or (passed and self._any_arrived)

    def _is_lent(self, unit: Unit) -> bool:
        """Whether autograd is inside a unit that uses parameters of this one."""
        return any(one in self._entered and one not in self._over for one in unit.borrowers)

    def finish(self) -> None:
        """End the run: reduce what is left, wait for all, release everything.

        Raises:
            CollectiveError: see `Reducer.finish`.
        """
        driver = self._driver
        if not self._any_arrived and self._expected:
            driver.expect_again(self._to_gather[::-1], self._expected[::-1])
            return
        for unit in self._to_gather:  # the other ranks may have needed it
            driver.start_gather(unit)
        if self._is_again:
            self._expected = [
                one for one in self._expected if one in self._entered or one in self._over
            ]
        for unit in driver.units:
            if unit not in self._over and unit not in self._expected and unit.has_gradients():
                self._expect(unit)  # from an earlier backward that did not reduce
        self._over.update(self._expected)
        self._reduce_ready()
        self._reducer.finish()
        driver.end_backward()

    def _expect(self, unit: Unit) -> None:
        self._expected.append(unit)
        self._expected.sort(key=self._driver.place, reverse=True)

    def _reduce_ready(self) -> None:
        while self._expected and self._expected[0] in self._over:
            unit = self._expected.pop(0)
            if unit.sync and not unit.held:
                self._reducer.start(unit)


def check_whole(unit: Unit, what: str) -> None:
    """Check that a unit's parameters are in memory.

    Raises:
        RuntimeError: they are not, so what was just computed cannot be right.
    """
    if unit.state is not State.WHOLE:
        raise RuntimeError(
            f"{what} was computed while {unit} was sharded: something computed inside the unit "
            "left it other than through its outputs. Return it from forward, or call unshard() "
            "before backward"
        )
