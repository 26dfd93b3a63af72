"""Nodes with their own clocks, a network that delays, breaks and heals, and no process.

The nodes hold the real electors, leases, permits and offices; the rest here stands for the agent
and its links. The checker reads `History`: which worlds ran, and when two ran at once.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from echelon.launcher.election.candidacy import Candidacy
from echelon.launcher.election.elector import Canvass, Elector
from echelon.launcher.election.lease import Permit
from echelon.launcher.election.mandate import WITNESS, Mandate, Member, ballot_of
from echelon.launcher.election.office import KILL_S, Beat, Office, Reply
from echelon.launcher.election.witness import Renewal, Witness

PROMISE_S = 3.0
_STEP_S = 0.05
_LONGEST_KILL_S = 0.5  # from the decision to the death of the last rank
World = tuple[int, int]  # term and number


@dataclass
class History:
    """Every world that ran, and the moments at which two did."""

    worlds: list[tuple[float, World]] = field(default_factory=list)
    overlaps: list[tuple[float, set[World]]] = field(default_factory=list)


class Network:
    """Who reaches whom, and what is on its way."""

    def __init__(self, dice: random.Random, names: list[str]) -> None:
        self.t = 0.0
        self.island: dict[str, int] = dict.fromkeys(names, 0)
        self.slow_s = 0.1  # the mean delay
        self.deaf: set[frozenset[str]] = set()  # pairs that do not reach each other
        self._dice = dice
        self._queue: list[tuple[float, int, str, str, Callable[[], None], bool]] = []
        self._ids = itertools.count()
        self._last: dict[tuple[str, str], float] = {}

    def reaches(self, a: str, b: str) -> bool:
        """Return whether packets go from a to b."""
        return self.island[a] == self.island[b] and frozenset({a, b}) not in self.deaf

    def send(self, a: str, b: str, act: Callable[[], None], *, kept: bool) -> None:
        """Deliver after a random delay; `kept`: in order, and after a cut; else it may be lost."""
        due = self.t + self._dice.expovariate(1 / self.slow_s)
        if kept:
            due = self._last[a, b] = max(due, self._last.get((a, b), 0.0) + 1e-6)
        heapq.heappush(self._queue, (due, next(self._ids), a, b, act, kept))

    def deliver(self) -> None:
        """Deliver what is due."""
        again = []
        while self._queue and self._queue[0][0] <= self.t:
            due, number, a, b, act, kept = heapq.heappop(self._queue)
            if self.reaches(a, b):
                act()
            elif kept:
                again.append((due, number, a, b, act, kept))
        for one in again:
            heapq.heappush(self._queue, one)


class SimNode:
    """A launcher: always an elector; host, member or seeking; with or without ranks."""

    def __init__(self, job: Simulation, name: str) -> None:
        self.job, self.name = job, name
        self.rate = job.dice.uniform(0.98, 1.02)
        self.offset = job.dice.uniform(0, 1000)
        self.elector = Elector(name, PROMISE_S)
        self.permit = Permit()
        self.office: Office | None = None
        self.host = ""
        self.session = 0
        self.heard_s = 0.0
        self.candidacy: Candidacy | None = None
        self.alive = True
        self.world: World | None = None
        self.dies_s: float | None = None  # when its ranks are dead, in the network's time
        self.sessions: dict[str, int] = {}
        self.last_heard: dict[str, float] = {}
        self.idle: set[str] = set()
        self.fences_s = float("-inf")
        self.chosen: list[str] | None = None
        self.current: list[str] | None = None
        self.former = ""  # the host before
        self.number = 0
        self.held_s = 0.0
        self.began = False  # it has started a world as the host
        self.gathers_until_s = float("-inf")

    @property
    def now(self) -> float:
        """This node's own clock."""
        return self.job.net.t * self.rate + self.offset

    # ---- ranks ----

    def kill_ranks(self) -> None:
        """Begin to kill this node's ranks."""
        if self.world is not None and self.dies_s is None:
            self.dies_s = self.job.net.t + self.job.dice.uniform(0, _LONGEST_KILL_S)

    def start_ranks(self, world: World) -> None:
        """Start ranks of a world."""
        assert self.world is None, (self.name, self.world, world)
        self.world, self.dies_s = world, None
        self.job.history.worlds.append((self.job.net.t, world))

    def crash(self) -> None:
        """End the launcher, and with it its ranks."""
        self.alive = False
        self.kill_ranks()

    # ---- one step ----

    def step(self) -> None:
        """Do what is due."""
        if self.dies_s is not None and self.job.net.t >= self.dies_s:
            self.world = self.dies_s = None
        if not self.alive:
            return
        if self.office is not None:
            self._step_host(self.office)
            return
        if self.world is not None and self.now >= self.permit.expires_s:
            self.kill_ranks()
        if self.host:
            self._check_host()
        if self.candidacy is not None:
            self._seek(self.candidacy)

    # ---- as the host ----

    def _step_host(self, office: Office) -> None:
        now = self.now
        holds = office.remaining_s(now) > 0
        if holds:
            self.held_s = now
            self.elector.on_beat(office.term, self.name, now)
        lapsed = not holds and (self.current is not None or now > self.held_s + PROMISE_S)
        if lapsed or office.is_deposed:
            self._stand_down(office)
            return
        for name in list(self.sessions):
            if now - self.last_heard[name] > PROMISE_S:
                self._drop(name)
        for name, beat in office.beats(now):
            self._send_beat(name, beat)
        if self.current is not None and any(n not in self.sessions for n in self._others()):
            self._stop_all()
        if self.current is None:
            self._gather(office)
        elif self.job.witness is not None and office.follow_witness(now):
            self._entrust(office)

    def _stand_down(self, office: Office) -> None:
        """A minority stops itself; a host that never had a lease becomes a node again."""
        self.office = None
        self.sessions.clear()
        self.chosen = self.current = None
        if self.began or office.term == 0:  # the first host stops in any case
            self.crash()
        else:
            self.elector.lose_host(is_dead=False)
            self.candidacy = Candidacy(self.elector, office.term, self.now)

    def _others(self) -> list[str]:
        return [name for name in self.current or [] if name != self.name]

    def _drop(self, name: str) -> None:
        del self.sessions[name]
        self.idle.discard(name)
        if self.office is not None:
            self.fences_s = max(self.fences_s, self.office.remove(name))
        if self.chosen is not None and name in self.chosen:
            self.chosen = None

    def _stop_all(self) -> None:
        self.current = None
        self.kill_ranks()
        for name in self.sessions:
            self._to(name, lambda node: node.on_stop())

    def _gather(self, office: Office) -> None:
        here = [self.name, *sorted(self.sessions)]
        members = [one.name for one in office.mandate.members if one.name != self.former]
        if self.now < self.gathers_until_s and any(name not in here for name in members):
            return
        ready = self.world is None and all(name in self.idle for name in self.sessions)
        least = 1 if self.job.witness is not None and self.number > 0 else 2
        if self.chosen != here and ready and len(here) >= least:
            self.chosen = here
            office.propose(
                [self.job.member(name) for name in here], attempt=self.number, restarts=0,
                num_attempts=0, has_witness=office.is_heard(WITNESS, self.now),
            )  # fmt: skip
            self._entrust(office)
        if self.chosen is None or not office.is_held() or not office.is_held_by(self.chosen):
            return
        if not ready or self.now < self.fences_s or office.remaining_s(self.now) <= 0:
            return
        world = (office.term, self.number)
        office.settle()
        self._entrust(office)
        self.current, self.chosen = self.chosen, None
        for name, beat in office.beat_to(self._others(), self.now):
            self._send_beat(name, beat)
            self._to(name, lambda node: node.on_start(world))
        self.number += 1
        self.began = True
        self.idle.clear()
        self.start_ranks(world)

    def _entrust(self, office: Office) -> None:
        mandate = office.mandate
        self.elector.on_mandate(mandate)
        for name in self.sessions:
            self._to(name, lambda node: node.on_mandate(mandate))
        self._to_witness(Beat(term=office.term, host="", number=0, echo=0, remaining_ms=0))

    def _to_witness(self, beat: Beat) -> None:
        witness, office = self.job.witness, self.office
        if witness is None or office is None:
            return
        renewal = Renewal(
            term=beat.term, host=beat.host, number=beat.number, holds=beat.holds,
            promise_s=PROMISE_S, mandate=ballot_of(office.mandate),
        )  # fmt: skip

        def answered(reply: Reply) -> None:
            if self.alive and self.office is office:
                office.on_reply(WITNESS, reply, self.now)

        def deliver() -> None:
            renewed = witness.witness.on_renewal("job", renewal, witness.now)
            reply = Reply(
                term=renewed.term, number=renewed.number, stamp=renewed.number,
                version=renewed.version,
            )  # fmt: skip
            self.job.net.send(WITNESS, self.name, lambda: answered(reply), kept=False)

        self.job.net.send(self.name, WITNESS, deliver, kept=False)

    def _send_beat(self, name: str, beat: Beat) -> None:
        if name == WITNESS:
            self._to_witness(beat)
            return
        self._to(name, lambda node: node.on_beat(beat))

    def _to(self, name: str, act: Callable[[SimNode], None]) -> None:
        session, node = self.sessions.get(name), self.job.nodes[name]

        def deliver() -> None:
            if node.alive and node.host == self.name and node.session == session:
                act(node)

        self.job.net.send(self.name, name, deliver, kept=True)

    def on_hello(self, name: str, session: int, *, idle: bool) -> None:
        """Take in a node that connects."""
        if not self.alive or self.office is None:
            return
        if name in self.sessions:
            self._drop(name)
        self.sessions[name], self.last_heard[name] = session, self.now
        self.office.add(name)
        mandate = self.office.mandate
        self._to(name, lambda node: node.on_mandate(mandate))
        if idle:
            self.idle.add(name)
        else:
            self._to(name, lambda node: node.on_stop())

    # ---- as a member ----

    def _back(self, act: Callable[[SimNode], None]) -> None:
        host, session = self.job.nodes[self.host], self.session

        def deliver() -> None:
            if host.alive and host.sessions.get(self.name) == session:
                host.last_heard[self.name] = host.now
                act(host)

        self.job.net.send(self.name, self.host, deliver, kept=True)

    def _reply(self, number: int) -> None:
        reply = Reply(
            term=self.elector.term, number=number, stamp=self.permit.stamp(self.now),
            version=self.elector.version,
        )  # fmt: skip

        def take(host: SimNode) -> None:
            if host.office is not None:
                host.office.on_reply(self.name, reply, host.now)

        self._back(take)

    def on_beat(self, beat: Beat) -> None:
        """Take in the host's beat."""
        self.heard_s = self.now
        if self.elector.on_beat(beat.term, beat.host, self.now):
            self.permit.extend(beat.echo, beat.remaining_ms / 1e3)
        self._reply(beat.number)

    def on_mandate(self, mandate: Mandate) -> None:
        """Keep a mandate."""
        self.heard_s = self.now
        self.elector.on_mandate(mandate)
        self._reply(0)

    def on_start(self, world: World) -> None:
        """Start ranks, if the permit lasts."""
        if self.now < self.permit.expires_s and self.world is None:
            self.start_ranks(world)

    def on_stop(self) -> None:
        """Kill the ranks, and report it once they are dead."""
        self.kill_ranks()
        self.job.when_idle(self, lambda: self._back(lambda host: host.idle.add(self.name)))

    def _check_host(self) -> None:
        host = self.job.nodes[self.host]
        ended = not host.alive or host.office is None
        seen = self.job.net.reaches(self.name, self.host) and (
            ended or host.sessions.get(self.name, self.session) != self.session
        )
        if self.now - self.heard_s > PROMISE_S or (seen and self.job.dice.random() < 0.1):
            self.elector.lose_host(is_dead=seen and not host.alive)
            self.former, self.host = self.host, ""
            self.candidacy = Candidacy(self.elector, self.elector.term, self.now)

    def join(self, host: str) -> None:
        """Connect to a host."""
        self.host, self.session = host, next(self.job.sessions)
        self.heard_s = self.now
        self.candidacy = None
        session, idle, node = self.session, self.world is None, self.job.nodes[host]
        if idle:
            self.permit = Permit()
        self.job.net.send(
            self.name, host, lambda: node.on_hello(self.name, session, idle=idle), kept=True
        )

    # ---- seeking ----

    def _seek(self, candidacy: Candidacy) -> None:
        asked = candidacy.due(self.now)
        if asked is not None and self.elector.mandate is not None:
            for name in self.elector.mandate.electors:
                if name == WITNESS:
                    self.job.ask_witness(self, candidacy, asked)
                elif name != self.name:
                    self.job.ask(self, self.job.nodes[name], candidacy, asked)
        if candidacy.found is not None:
            self.join(candidacy.found[1])
        elif candidacy.is_elected:
            self._take_office(candidacy)

    def _take_office(self, candidacy: Candidacy) -> None:
        assert self.elector.mandate is not None
        self.candidacy = None
        self.office = Office(self.name, candidacy.term, self.elector.mandate, PROMISE_S)
        self.elector.on_mandate(self.office.mandate)
        if self.job.witness is not None:
            self.office.add(WITNESS)
        self.fences_s = self.now + KILL_S + (PROMISE_S if candidacy.was_early else 0.0)
        self.number = self.elector.mandate.attempt + 1
        self.held_s, self.began = self.now, False
        self.gathers_until_s = self.now + PROMISE_S
        self.kill_ranks()


class SimWitness:
    """A witness with a clock of its own."""

    def __init__(self, job: Simulation) -> None:
        self._job = job
        self._rate, self._offset = job.dice.uniform(0.98, 1.02), job.dice.uniform(0, 1000)
        self.witness = Witness()

    @property
    def now(self) -> float:
        """The witness's own clock."""
        return self._job.net.t * self._rate + self._offset

    def restart(self) -> None:
        """Forget everything."""
        self.witness = Witness()

    def vote_counts(self, version: tuple[int, int]) -> bool:
        """Return whether it would vote for a candidate that holds this version."""
        elector = self.witness._electors.get("job")
        return elector is not None and elector.version <= version


class Simulation:
    """A job of `count` nodes; the first one hosts it."""

    def __init__(self, seed: int, count: int, *, has_witness: bool = False) -> None:
        self.dice = random.Random(seed)
        names = [f"n{i}" for i in range(count)]
        self.net = Network(self.dice, [*names, WITNESS])
        self.witness = SimWitness(self) if has_witness else None
        self.history = History()
        self.sessions = itertools.count(1)
        self.nodes = {name: SimNode(self, name) for name in names}
        self._waiting: list[tuple[SimNode, Callable[[], None]]] = []
        first = self.nodes[names[0]]
        mandate = Mandate(
            term=0, index=0, electorates=((names[0],),), members=(self.member(names[0]),),
            job_id="job", witness="w:1" if has_witness else "", founder="job",
        )  # fmt: skip
        first.office = Office(names[0], 0, mandate, PROMISE_S)
        if has_witness:
            first.office.add(WITNESS)
        for name in names[1:]:
            self.nodes[name].join(names[0])

    def member(self, name: str) -> Member:
        """Return a node as the mandate names it."""
        return Member(name=name, host=name, endpoint=f"{name}:1", num_workers=1, node_rank=-1)

    def when_idle(self, node: SimNode, act: Callable[[], None]) -> None:
        """Act once a node has no ranks."""
        self._waiting.append((node, act))

    def ask(self, a: SimNode, b: SimNode, candidacy: Candidacy, asked: Canvass) -> None:
        """Carry a question and its answer; either may be lost."""

        def deliver() -> None:
            if not b.alive:
                return
            answer = b.elector.on_canvass(asked, b.now)

            def answered() -> None:
                if a.alive and a.candidacy is candidacy:
                    candidacy.on_answer(b.name, asked, answer, a.now)

            self.net.send(b.name, a.name, answered, kept=False)

        self.net.send(a.name, b.name, deliver, kept=False)

    def ask_witness(self, a: SimNode, candidacy: Candidacy, asked: Canvass) -> None:
        """Carry a question to the witness, and its answer; either may be lost."""
        witness = self.witness
        assert witness is not None

        def deliver() -> None:
            answer = witness.witness.on_canvass("job", asked, witness.now)

            def answered() -> None:
                if a.alive and a.candidacy is candidacy:
                    candidacy.on_answer(WITNESS, asked, answer, a.now)

            self.net.send(WITNESS, a.name, answered, kept=False)

        self.net.send(a.name, WITNESS, deliver, kept=False)

    def run(self, seconds: float) -> None:
        """Let time pass, and hold every moment against the rule."""
        end = self.net.t + seconds
        while self.net.t < end:
            self.net.t += _STEP_S
            self.net.deliver()
            for node in self.nodes.values():
                node.step()
            waiting, self._waiting = self._waiting, []
            for node, act in waiting:
                if node.alive and node.host and node.world is None:
                    act()
                elif node.alive:
                    self._waiting.append((node, act))
            running = self.running()
            if len(running) > 1:
                self.history.overlaps.append((self.net.t, running))

    def running(self) -> set[World]:
        """Return the worlds that have ranks now."""
        return {node.world for node in self.nodes.values() if node.world is not None}

    def host(self) -> SimNode | None:
        """Return the living host of the latest term."""
        terms = {
            node.office.term: node
            for node in self.nodes.values()
            if node.alive and node.office is not None
        }
        return terms[max(terms)] if terms else None

    def has_majority(self) -> bool:
        """Return whether the living nodes hold a majority of the latest mandate's electors."""
        alive = [n for n in self.nodes.values() if n.alive]
        mandates = [n.office.mandate if n.office else n.elector.mandate for n in alive]
        known = [one for one in mandates if one is not None]
        if len(alive) < (1 if self.witness else 2) or not known:
            return False
        if self.witness is not None and not self.history.worlds:
            return False  # the host still waits for the second node
        latest = max(known, key=lambda one: one.version)
        votes = [n.name for n in alive]
        if self.witness is not None and self.witness.vote_counts(latest.version):
            votes.append(WITNESS)
        return latest.is_majority(votes)
