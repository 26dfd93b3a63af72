"""Probe suspect nodes between two attempts.

    WAITING --pause nearly over--> ASKED --all answered, or 20 s--> over, if all probes passed
       ^                             |
       +-- back-off -----------------+-- a probe failed: excluded if another node can take its place

To measure a link, a partner node is first asked to listen. Then the suspect node measures the link
to the partner. Probes run on the nodes and are requested through control messages, so this module
never blocks. The findings are added to `report.json` and to the incidents of the next attempt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from echelon.launcher.control import messages as m
from echelon.launcher.coordinator.gathering.roster import Node, Roster
from echelon.launcher.coordinator.policy.failure import Failure
from echelon.launcher.coordinator.policy.probes import PATIENCE_S, probes_for, tries_of, wait_s
from echelon.launcher.doctor.probes.finding import (
    DEADLINE_S,
    LISTEN,
    NETWORK,
    STORAGE,
    Finding,
    State,
    Task,
)
from echelon.launcher.doctor.probes.pair import new_token
from echelon.launcher.options.options import Options

MOST_SUSPECTS = 16  # of a failure that names more, these stand for all
_ANSWER_S = DEADLINE_S + 5.0
_FIRST_NUMBER = 1


@dataclass(slots=True)
class _Round:
    """One round of probes on all suspect nodes.

    Attributes:
        tasks: the tasks of each node that has not answered in the current phase.
        links: the (suspect, partner) pairs of nodes to measure once the partners are listening.
        found: the findings so far, as (node, finding) pairs.
    """

    number: int
    due_s: float
    tasks: dict[str, list[Task]]
    links: list[tuple[str, str]]
    token: str
    found: list[tuple[str, Finding]] = field(default_factory=list)
    ports: dict[str, int] = field(default_factory=dict)
    is_second: bool = False


class Probing:
    """The probes that run on a job's nodes between two attempts.

    Args:
        decisions: returns the report's decisions. Findings are added to the last decision.
        host_address: the address at which nodes reach the hosting node.
        note: called after each round of probes.
    """

    def __init__(
        self,
        options: Options,
        roster: Roster,
        decisions: Callable[[], list[dict[str, Any]]],
        send: Callable[[str, m.Command], None],
        say: Callable[[str], None],
        host_address: str,
        note: Callable[[], None] = lambda: None,
    ) -> None:
        self._options = options
        self._roster = roster
        self._decisions = decisions
        self._send = send
        self._say = say
        self._host_address = host_address
        self._note = note
        self._probes: tuple[str, ...] = ()
        self._suspects: list[str] = []
        self._named: list[str] = []  # all suspects of the failure
        self._attempt = 0
        self._next_s = 0.0  # of the next round, while none runs
        self._until_s = 0.0
        self._failed: dict[str, int] = {}  # node -> failed rounds
        self._round: _Round | None = None
        self._number = _FIRST_NUMBER

    @property
    def is_over(self) -> bool:
        """True if no node is left to probe, in which case the next world can begin."""
        return not self._suspects

    @property
    def waits_for(self) -> str:
        """A description of the probes for which the restart is waiting; "" if there are none."""
        hosts = ", ".join(self._host_of(name) for name in self._suspects)
        return f"probes of {hosts} ({', '.join(self._probes)})" if hosts else ""

    def deadline_s(self) -> float:
        """Return the time by which `step` must be called."""
        if not self._suspects:
            return float("inf")
        return self._next_s if self._round is None else self._round.due_s

    def begin(self, failure: Failure | None, attempt: int, now_s: float) -> None:
        """Start probing the nodes that are suspect after a failure.

        Args:
            failure: the failure; None means that no node is suspect.
            attempt: the number of the next attempt.
            now_s: the time at which the first round is due.
        """
        self._round, self._failed, self._suspects = None, {}, []
        self._probes = () if failure is None else probes_for(failure)
        if failure is None or not self._probes:
            return
        nodes = [name for name in failure.nodes if self._is_here(name)]
        self._named = self._suspects = nodes[:MOST_SUSPECTS]
        self._attempt, self._next_s, self._until_s = attempt, now_s, now_s + PATIENCE_S

    def lose(self, node: str) -> None:
        """Stop waiting for a node that has disconnected."""
        self._suspects = [name for name in self._suspects if name != node]
        if self._round is not None:
            self._round.tasks.pop(node, None)

    def take(self, node: str, event: m.Probed) -> None:
        """Handle the findings that a node has reported."""
        present = self._round
        if present is None or event.number != present.number or node not in present.tasks:
            return
        for task, finding in zip(present.tasks.pop(node), _unpacked(event), strict=False):
            if task.probe == LISTEN:
                present.ports[node] = int(finding.figures.get("port", 0))
            else:
                present.found.append((node, finding))

    def step(self, now_s: float) -> None:
        """Start a round of probes if one is due; finish a round that is complete or overdue."""
        if not self._suspects:
            return
        if self._round is None:
            if now_s < self._next_s:
                return
            self._round = self._ask(now_s)
        present = self._round
        if present.tasks and now_s < present.due_s:
            return
        self._note_silent(present)
        if present.links and not present.is_second:
            self._ask_links(present, now_s)
        if not present.tasks:
            self._conclude(present, now_s)
            self._note()

    def _ask(self, now_s: float) -> _Round:
        """Ask the suspect nodes to run probes, and the nodes that they probe to listen."""
        tasks: dict[str, list[Task]] = {}
        links = list(self._links()) if NETWORK in self._probes else []
        token = new_token()
        for name in self._suspects:
            own = [task for probe in self._probes for task in self._tasks(probe)]
            if own:
                tasks[name] = own
        for _, partner in links:
            tasks.setdefault(partner, []).append(Task(probe=LISTEN, token=token, deadline_s=60))
        present = _Round(self._new_number(), now_s + _ANSWER_S, tasks, links, token)
        if NETWORK in self._probes and not links:
            alone = Finding(
                probe=NETWORK,
                state=State.SKIPPED,
                text="no other node is connected to measure with",
            )
            present.found += [(name, alone) for name in self._suspects]
        self._send_all(present)
        return present

    def _tasks(self, probe: str) -> Iterator[Task]:
        if probe == NETWORK:
            return
        yield Task(probe=probe)
        if probe == STORAGE and self._options.checkpoint_dir is not None:
            yield Task(probe=STORAGE, folder=str(self._options.checkpoint_dir))

    def _links(self) -> Iterator[tuple[str, str]]:
        """Yield each remaining suspect with a partner node, to measure the link between them."""
        if self._has_pairs:  # the links between those that the failure names
            pairs = zip(self._named, self._named[1:], strict=False)
            yield from ((a, b) for a, b in pairs if a in self._suspects and self._is_here(b))
            return
        (suspect,) = self._suspects
        others = [node.name for node in self._roster.nodes if node.name != suspect]
        yield from ((suspect, other) for other in others[:1])

    @property
    def _has_pairs(self) -> bool:
        """True if the failure names several nodes. The links between them are then measured."""
        return len(self._named) > 1

    def _ask_links(self, present: _Round, now_s: float) -> None:
        """Ask the suspect nodes to measure the links to their partner nodes."""
        present.is_second = True
        present.number, present.due_s = self._new_number(), now_s + _ANSWER_S
        for suspect, partner in present.links:
            port = present.ports.get(partner, 0)
            if not port:
                text = f"{self._host_of(partner)} did not listen"
                skipped = Finding(probe=NETWORK, state=State.SKIPPED, text=text)
                present.found.append((suspect, skipped))
                continue
            task = Task(
                probe=NETWORK,
                address=self._address_of(partner),
                port=port,
                peer=self._host_of(partner),
                token=present.token,
            )
            present.tasks.setdefault(suspect, []).append(task)
        self._send_all(present)

    def _send_all(self, present: _Round) -> None:
        for name, tasks in present.tasks.items():
            packed = [task.pack() for task in tasks]
            self._send(name, m.Probe(number=present.number, tasks=packed))

    def _note_silent(self, present: _Round) -> None:
        """If a node missed the deadline, count its outstanding probes, except LISTEN, as failed."""
        for name, tasks in present.tasks.items():
            for task in tasks:
                if task.probe != LISTEN:
                    text = f"the node did not answer within {_ANSWER_S:g} s"
                    late = Finding(probe=task.probe, state=State.BROKEN, text=text)
                    present.found.append((name, late))
        present.tasks.clear()

    def _conclude(self, present: _Round, now_s: float) -> None:
        """Report a round's findings, and decide what to do with each node that failed.

        A node that has failed in too many rounds is excluded, if possible. The other failed nodes
        are probed again later. Once the restart can wait no longer, the job restarts with these
        nodes anyway.
        """
        self._round = None
        rows = [(name, finding) for name, finding in present.found if name in self._suspects]
        self._keep(rows)
        broken: dict[str, list[Finding]] = {}
        for name, finding in rows:
            if finding.is_broken:
                broken.setdefault(name, []).append(finding)
        for name in dict.fromkeys(name for name, _ in rows if name not in broken):
            self._say_whole(name, [one for owner, one in rows if owner == name])
        self._suspects = [name for name in broken if not self._exclude(name, broken[name])]
        if not self._suspects:
            return
        wait = wait_s(max(self._failed[name] for name in self._suspects))
        is_last = now_s + wait > self._until_s
        after = "restarting anyway" if is_last else f"next probe in {wait:g} s"
        for name in self._suspects:
            self._say_broken(name, broken[name], after)
        self._next_s = now_s + wait
        if is_last:
            self._suspects = []

    def _exclude(self, name: str, broken: Sequence[Finding]) -> bool:
        """Count a failed round of a node's probes.

        After too many failed rounds, exclude the node if enough other nodes remain. Return whether
        the node was excluded.
        """
        self._failed[name] = self._failed.get(name, 0) + 1
        is_due = any(self._failed[name] >= tries_of(one.probe) for one in broken)
        is_only_a_link = self._has_pairs and all(one.probe == NETWORK for one in broken)
        can = self._roster.count_without([name]) >= self._options.min_nodes
        if not (is_due and can and self._options.exclude_after) or is_only_a_link:
            return False
        self._roster.avoid([name])
        self._say_broken(name, broken, "excluded")
        self._last().setdefault("excluded", []).append(self._host_of(name))
        return True

    def _say_whole(self, name: str, found: Sequence[Finding]) -> None:
        measured = [one for one in found if one.state is State.WHOLE]
        if measured:
            what = "; ".join(f"{one.probe}: {one.text}" for one in measured)
            self._say(f"probe of {self._host_of(name)}: {what}")

    def _say_broken(self, name: str, broken: Sequence[Finding], after: str) -> None:
        what = "; ".join(f"{one.probe}: {one.text}" for one in broken)
        self._say(f"probe of {self._host_of(name)} failed: {what}; {after}")

    def _keep(self, rows: Sequence[tuple[str, Finding]]) -> None:
        """Add findings to the last decision, and drop its earlier findings except for failures."""
        kept = [one for one in self._last().get("probes", []) if one["state"] == State.BROKEN.value]
        for name, finding in rows:
            kept.append({"before": self._attempt, "host": self._host_of(name), **finding.to_json()})
        self._last()["probes"] = kept

    def _last(self) -> dict[str, Any]:
        decisions = self._decisions()
        return decisions[-1] if decisions else {}

    def _is_here(self, name: str) -> bool:
        return any(node.name == name for node in self._roster.nodes) and (
            name not in self._roster.avoided
        )

    def _node(self, name: str) -> Node | None:
        return next((node for node in self._roster.nodes if node.name == name), None)

    def _host_of(self, name: str) -> str:
        node = self._node(name)
        return name if node is None else node.host

    def _address_of(self, name: str) -> str:
        node = self._node(name)
        return (node.address if node is not None else "") or self._host_address

    def _new_number(self) -> int:
        self._number += 1
        return self._number


def evidence(decisions: Sequence[Mapping[str, Any]]) -> list[str]:
    """Describe the probes that ran before the current attempt, in one sentence each."""
    probes = decisions[-1].get("probes", []) if decisions else []
    return [
        f"the probe before attempt {one['before']} "
        f"{'failed' if one['state'] == State.BROKEN.value else 'measured'} on {one['host']} "
        f"({one['probe']}): {one['text']}"
        for one in probes
        if one["state"] != State.SKIPPED.value
    ]


def _unpacked(event: m.Probed) -> Iterator[Finding]:
    for text in event.findings:
        try:
            yield Finding.unpack(text)
        except ValueError as err:
            yield Finding(probe=STORAGE, state=State.SKIPPED, text=f"malformed answer: {err}")
