"""Simulated agents for `rendezvous.py`: real sessions with the coordinator, but no workers."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import time
from typing import Any

import grpc.aio

from echelon.launcher.control import messages as m
from echelon.launcher.control.client import METHOD, OPTIONS
from echelon.launcher.control.lifesign import LifeSign
from echelon.launcher.control.seal import Seal, new_nonce
from echelon.launcher.control.session import Session
from echelon.launcher.coordinator.decide import SETTLE_S
from echelon.launcher.doctor.probes.finding import Finding, State, Task

SECRET = b"a-secret-of-the-benchmark"
STALL_S = 20.0  # `--stall-timeout`
FIRST_LOOK_S = 0.1  # until a node whose connection broke is first looked for: `control/server.py`
_WAIT_S = 120.0
# Gives the host time to process the dumps of a stall before the next event.
_DUMPS_S = 1.0
_DUMPS_PER_AGENT_S = 7.0 / 512  # of one process: eight seconds for 1,024 agents in two
_DUMP = os.urandom(24_000)  # of one rank, as packed


class Agent:
    """A simulated node that obeys the coordinator and reports the state of fictitious ranks.

    Attributes:
        pending_since_s: the time at which its first rank began to wait; 0 if no rank waits.
        seen: the kinds of commands received since the set was last cleared.
    """

    def __init__(self, endpoint: str, number: int, ranks: int) -> None:
        self.channel = grpc.aio.insecure_channel(  # a connection of its own
            endpoint, options=(*OPTIONS, ("grpc.use_local_subchannel_pool", 1))
        )
        self.name = f"agent-{number}"
        self.ranks = ranks
        self.life = LifeSign(endpoint)
        self.state = Session()
        self.writing = asyncio.Lock()
        self.start: m.Start | None = None
        self.started = asyncio.Event()
        self.pending_since_s = 0.0
        self.moves = 0
        self.seen: set[str] = set()
        self.tasks: list[asyncio.Future[Any]] = []

    async def meet(self) -> None:
        """Connect and wait for the first start command."""
        deadline_s = time.monotonic() + 120
        while True:
            try:
                await self.greet()
                break
            except (grpc.RpcError, OSError):
                if time.monotonic() > deadline_s:
                    raise
                await asyncio.sleep(0.25)
        self.tasks = [asyncio.ensure_future(self.beats()), asyncio.ensure_future(self.obeys())]
        await self.started.wait()

    async def greet(self) -> None:
        """Open a session with the coordinator."""
        self.call = self.channel.stream_stream(METHOD)()
        nonce = new_nonce()
        await self.call.write(nonce)
        self.seal = Seal(SECRET, nonce, await self.read(), is_host=False)
        hello = m.Hello(
            node=self.name, host=self.name, num_workers=self.ranks, life_port=self.life.port
        )
        await self.call.write(self.seal.close(m.pack(hello)))
        welcome = m.unpack(self.seal.open(await self.read()))
        assert isinstance(welcome, m.Welcome)
        self.beat_s = welcome.beat_ms / 1e3

    async def read(self) -> bytes:
        """Wait for the next frame and return it."""
        frame = await self.call.read()
        if not isinstance(frame, bytes):
            raise OSError("the stream ended")
        return frame

    async def obeys(self) -> None:
        """Execute the coordinator's commands until the job is over."""
        while True:
            body = self.state.take(self.seal.open(await self.read()))
            if not self.state.is_idle or self.state.owes_acknowledgement:
                await self.flush()
            command = m.unpack(body) if body is not None else None
            if command is None:
                continue
            self.seen.add(type(command).__name__)
            if isinstance(command, m.Start):
                self.start = command
                self.started.set()
            elif isinstance(command, m.Collect):
                await self.send_dumps(command)
            elif isinstance(command, m.Stop):
                await self.end_ranks(-int(command.number))
            elif isinstance(command, m.Probe):
                await self.say(m.Probed(number=command.number, findings=_all_whole(command)))
            elif isinstance(command, m.ClearUp):
                await self.say(m.Idle(attempt=command.attempt, exit_codes=[], stopped=[]))
            elif isinstance(command, m.Over):
                return

    async def send_dumps(self, command: m.Collect) -> None:
        """Send the dumps of all ranks."""
        assert self.start is not None
        for rank in range(self.start.first_rank, self.start.first_rank + self.ranks):
            await self.say(m.DumpPart(incident=command.incident, rank=rank, data=_DUMP))
        await self.say(m.Harvested(incident=command.incident, exit_codes=[]))

    async def end_ranks(self, code: int) -> None:
        """Report that all ranks have exited with `code`."""
        start = self.start
        assert start is not None
        for rank in range(start.first_rank, start.first_rank + self.ranks):
            await self.say(m.WorkerEnded(attempt=start.attempt, rank=rank, code=code))

    async def beats(self) -> None:
        """Send heartbeats or reports at the interval that the coordinator requests."""
        while True:
            every_s = self.beat_s
            if self.start is not None:
                every_s = self.start.sights_ms / 1e3
                await self.report()
            else:
                async with self.writing:
                    await self.call.write(self.seal.close(self.state.beat()))
            await asyncio.sleep(every_s)

    async def report(self) -> None:
        """Report the state of the ranks."""
        assert self.start is not None
        pending_ms = -1
        if self.pending_since_s:
            pending_ms = int((time.monotonic() - self.pending_since_s) * 1000)
        else:
            self.moves += 100
        row = [self.start.first_rank, 1, 3, pending_ms, self.start.first_rank, self.moves, 0]
        await self.say(m.Sights(attempt=self.start.attempt, folded=row, ranks=[]))

    async def flush(self) -> None:
        """Write all pending frames and acknowledgements."""
        async with self.writing:
            while (frame := self.state.frame()) is not None:
                await self.call.write(self.seal.close(frame))
            if self.state.owes_acknowledgement:
                await self.call.write(self.seal.close(self.state.beat()))

    async def say(self, event: Any) -> None:
        """Send an event to the coordinator."""
        self.state.put(m.pack(event))
        await self.flush()

    async def hang_up(self) -> None:
        """Disconnect without a message."""
        for task in self.tasks:
            task.cancel()
        self.life.close()
        with contextlib.suppress(Exception):
            self.call.cancel()
        await self.channel.close()


def _all_whole(command: m.Probe) -> list[str]:
    tasks = map(Task.unpack, command.tasks)
    found = (Finding(probe=task.probe, state=State.WHOLE, text="simulated") for task in tasks)
    return [one.pack() for one in found]


class Simulation:
    """The agents of one process, and the actions that they perform on request."""

    def __init__(self, endpoint: str, first: int, count: int, ranks: int) -> None:
        self._is_first = first == 0
        self._agents = [Agent(endpoint, first + index, ranks) for index in range(count)]

    async def live(self, gate: Any) -> None:
        """Connect all agents, perform the requested actions, and disconnect."""
        gate.send("ready")
        gate.recv()
        await asyncio.gather(*(agent.meet() for agent in self._agents))
        gate.send(time.monotonic())
        loop = asyncio.get_running_loop()
        while (what := await loop.run_in_executor(None, gate.recv)) != "end":
            gate.send(await self._act(what))  # this machine has one monotonic clock
        for agent in self._agents:
            await agent.end_ranks(0)
        await self._seen_by_all("Over")
        for agent in self._agents:
            await agent.hang_up()
        gate.send("ended")

    async def _act(self, what: str) -> float:
        """Perform one action if this process has the agent for it; return the time it was due."""
        for agent in self._agents:
            agent.seen.clear()
            agent.started.clear()
        if what == "stall":
            return await self._stall()
        due_s = time.monotonic() + SETTLE_S
        if what == "lose":
            due_s += FIRST_LOOK_S
            if not self._is_first:
                await self._agents.pop().hang_up()
        elif self._is_first:
            await self._fail(self._agents[0])
        await self._seen_by_all("Stop")
        await self._seen_by_all("Start")
        return due_s

    async def _stall(self) -> float:
        # The waiting operation reaches its limit in half a second.
        due_s = time.monotonic() + 0.5
        for agent in self._agents:
            agent.pending_since_s = due_s - STALL_S
            await agent.report()
        await self._seen_by_all("Collect")
        await asyncio.sleep(1.0)
        for agent in self._agents:
            agent.pending_since_s = 0.0
        await asyncio.sleep(_DUMPS_S + _DUMPS_PER_AGENT_S * len(self._agents))
        return due_s

    async def _fail(self, agent: Agent) -> None:
        start = agent.start
        assert start is not None
        await agent.say(m.WorkerEnded(attempt=start.attempt, rank=start.first_rank, code=1))

    async def _seen_by_all(self, kind: str) -> None:
        """Wait until every agent has received a command."""
        deadline_s = time.monotonic() + _WAIT_S
        while any(kind not in agent.seen for agent in self._agents):
            assert time.monotonic() < deadline_s, kind
            await asyncio.sleep(0.01)


def simulate(endpoint: str, first: int, count: int, ranks: int, gate: Any) -> None:
    """Run `count` agents that obey the coordinator, and perform the requested actions."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))

    async def live() -> None:
        await Simulation(endpoint, first, count, ranks).live(gate)  # made on this loop

    asyncio.run(live())
