"""Handle the end of an attempt: wait for the verdict, decide on a restart, and pause before it.

Under the `smart` policy, a restart waits a few seconds for the verdict, which can show that a
restart would fail in the same way. A verdict that arrives too late for one restart is still taken
into account in later decisions.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from typing import Any

from echelon.launcher.coordinator.decide import EndAttempt
from echelon.launcher.coordinator.gathering.roster import Roster
from echelon.launcher.coordinator.policy.failure import Failure
from echelon.launcher.coordinator.policy.judging import failure_of, incident_of
from echelon.launcher.coordinator.policy.memory import Memory, pack, unpack
from echelon.launcher.coordinator.policy.policy import Action, Decision
from echelon.launcher.coordinator.restart.restarts import Restarts
from echelon.launcher.coordinator.world import World
from echelon.launcher.incident.verdicts import Verdicts
from echelon.launcher.job.report import Incident, Report
from echelon.launcher.options.options import Options

_MAX_TOLD = 16  # attempts in the history that each node receives
VERDICT_S = 5.0  # how long a restart waits for its verdict after all ranks have ended


class Restarting:
    """The restart decisions of one job."""

    def __init__(
        self,
        options: Options,
        roster: Roster,
        report: Report,
        verdicts: Verdicts,
        say: Callable[[str], None],
    ) -> None:
        self._options = options
        self._roster = roster
        self._report = report
        self._verdicts = verdicts
        self._say = say
        self._waits_until_s = 0.0  # 0: no verdict is awaited
        self._late: list[tuple[World, Incident]] = []
        self.restarts = Restarts(
            options.max_restarts,
            is_elastic=options.max_nodes > 1,
            policy=options.restart_policy,
            exclude_after=options.exclude_after,
            after_stalls=options.on_stall in ("restart", "replace"),
        )
        self.last_line = ""  # of the last decision
        self.not_before_s = 0.0  # when the next world may begin
        self.suspected: Failure | None = None  # whose nodes are checked before they are used again
        self.over = -1  # the latest attempt that has ended

    def awaits_verdict(self, world: World, end: EndAttempt, now_s: float) -> bool:
        """Return whether the decision must wait for the verdict on how an attempt ended."""
        incident = incident_of(world, self._report.incidents, end.ended_by)
        is_open = incident is not None and self._verdicts.is_open(incident)
        changed = self._options.max_nodes > 1 and (world.ranks_lost_for_good or world.leaving)
        wants = self.restarts.asks_for_verdict and self.restarts.is_failure(end) and not changed
        if not (is_open and wants and not world.unkillable):
            self._waits_until_s = 0.0
            return False
        if not self._waits_until_s:
            self._waits_until_s = now_s + VERDICT_S
        if now_s < self._waits_until_s:
            world.clear_deadline_s = self._waits_until_s
            return True
        self._waits_until_s = 0.0
        return False

    def decide(self, world: World, end: EndAttempt) -> bool:
        """Decide whether another attempt follows, and report the reason for the decision."""
        self.over, self.suspected = world.number, None
        self._revise()
        known: list[Failure] = []

        def explain() -> Failure:
            incident = incident_of(world, self._report.incidents, end.ended_by)
            if incident is not None and self._verdicts.is_open(incident):
                self._late.append((world, incident))
            known.append(failure_of(world, incident))
            return known[0]

        decision = self.restarts.next(
            end,
            lost=bool(world.ranks_lost_for_good),
            left=bool(world.leaving),
            lasted_s=time.monotonic() - world.started_s,
            num_nodes=len(self._roster.nodes),
            low=self._options.min_nodes,
            explain=explain,
            others=self._roster.count_without,
        )
        if decision is None:
            return False
        self._report.decisions.append(_to_json(world, decision, known, self.restarts.num_used))
        self.last_line = self._line(decision)
        if self.last_line:
            self._say(self.last_line)
        self._roster.avoid(decision.exclude)
        is_judged = decision.action is Action.RESTART and self.restarts.is_judged
        self.suspected = known[0] if known and is_judged else None
        self.not_before_s = time.monotonic() + decision.pause_s
        return decision.action is not Action.STOP

    def history(self) -> str:
        """Return a JSON string that tells the workers how the earlier attempts ended."""
        return json.dumps({"format": 1, "attempts": self._report.decisions[-_MAX_TOLD:]})

    def memory(self) -> str:
        """Return the restart policy's state, serialized for a node that takes over the job."""
        known = Memory(
            failures=tuple(self.restarts.failures),
            avoided=self._roster.avoided,
            decisions=tuple(self._report.decisions),
            over=self.over,
            suspected=self.suspected,
        )
        return pack(known)

    def inherit(self, memory: str) -> None:
        """Adopt a former host's restart history; print one line if it cannot be deserialized."""
        try:
            known = unpack(memory)
        except ValueError as err:
            self._say(f"the history of the job's failures is lost: {err}")
            return
        self.restarts.failures = list(known.failures)
        self._roster.avoid(known.avoided)
        self._report.decisions = list(known.decisions)
        self.over, self.suspected = known.over, known.suspected

    def _revise(self) -> None:
        """Update the facts about earlier failures with newly arrived verdicts."""
        late, self._late = self._late, []
        for world, incident in late:
            if self._verdicts.is_open(incident):
                self._late.append((world, incident))
            elif incident.verdict is not None:
                self.restarts.revise(world.number, failure_of(world, incident))

    def _line(self, decision: Decision) -> str:
        if decision.action is Action.CONTINUE:
            return decision.reason
        if decision.action is Action.STOP:
            return f"no restart: {decision.reason}" if self._options.max_restarts else ""
        restart = f"restart {self.restarts.num_used} of {self._options.max_restarts}"
        if decision.pause_s:
            restart += f" in {decision.pause_s:g} s"
        return f"{restart}: {decision.reason}" if decision.reason else restart


def _to_json(
    world: World, decision: Decision, known: Sequence[Failure], num_used: int
) -> dict[str, Any]:
    """Return a decision as an entry of report.json."""
    failure = known[0] if known else None
    return {
        "attempt": world.number,
        "action": decision.action.value,
        "reason": decision.reason,
        "restarts_used": num_used,
        "pause_s": decision.pause_s,
        "excluded": [world.hosts.get(node, node) for node in decision.exclude],
        "cause": None if failure is None else failure.cause,
        "site": None if failure is None else failure.site,
        "culprit_ranks": [] if failure is None else list(failure.culprit_ranks),
        "hosts": [] if failure is None else list(failure.hosts),
        "last_step": None if failure is None or failure.last_step < 0 else failure.last_step,
    }
