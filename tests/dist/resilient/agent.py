"""The launcher's part, in the test's own process: it sees deaths and publishes who is left."""

from __future__ import annotations

import contextlib
import os
import queue
import select
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from typing_extensions import Self

from echelon.launcher.coordinator.gathering.roster import Node
from echelon.launcher.coordinator.loss.losses import LOST, Losses
from echelon.launcher.coordinator.world import World
from echelon.launcher.job.report import Report
from echelon.launcher.job.rundir import RunDirectory
from echelon.launcher.options.options import parse
from echelon.store import StoreServer
from tests.support.ranks import run_ranks

_LOOK_S = 0.002
_KILLED = -9


class _Meeting:
    """The job's store, as `Losses` sees it."""

    def __init__(self, server: StoreServer) -> None:
        self.host, self.port = "127.0.0.1", server.port
        self.publish = server.publish
        self._server = server

    def admit(self, address: str) -> None: ...

    def has(self, keys: Sequence[str]) -> list[bool]:
        return self._server.hold(keys)

    def renew(self) -> None: ...

    def how_it_died(self) -> str:
        return ""


class Agent:
    """Watches the processes of ranks that report their pids.

    Args:
        on_loss: "replace": a test starts processes in the places of lost ranks, which are admitted.

    Attributes:
        report: of the job; has the continuations.
        pids: of the ranks that have reported.
        lost: for each rank, one item per loss: the newest epoch. None once the agent has ended.
    """

    def __init__(
        self,
        folder: Path,
        world_size: int,
        server: StoreServer,
        *argv: str,
        on_loss: str = "shrink",
    ) -> None:
        self.report = Report(job_id="x", world_size=world_size)
        self.pids: dict[int, int] = {}
        self.said: list[str] = []
        self.lost: list[queue.Queue[int | None]] = [queue.Queue() for _ in range(world_size)]
        self._replaces = on_loss == "replace"
        self._folder = folder
        self._size = world_size
        options = parse([*argv, "--on-loss", on_loss, "--no-python", "true"], {})
        node = Node(name=options.node_name, host="here", num_workers=world_size)
        self._world = World.of(
            [node], number=0, grace_s=1.0, stop_on_stall=False, stall_timeout_s=60.0
        )
        directory = RunDirectory(folder, "")
        self._losses = Losses(options, directory, _Meeting(server), self.report, self.said.append)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._error: BaseException | None = None

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def newest(self, rank: int) -> int:
        """Wait until a rank is lost; return the newest epoch by then."""
        found = self.lost[rank].get(timeout=900.0)
        if found is None:
            raise RuntimeError("the agent has ended") from self._error
        return found

    def _serve(self) -> None:
        try:
            self._watch()
        except BaseException as err:
            self._error = err
            raise
        finally:
            for one in self.lost:
                one.put(None)  # nothing can come any more

    def _watch(self) -> None:
        admissions = self._losses.admissions
        poll, ranks = select.epoll(), {}
        while not self._stop.is_set():
            for rank in set(range(self._size)) - set(self.pids):
                path = self._folder / f"{rank}.pid"
                if path.exists():
                    self.pids[rank] = int(path.read_text())
                    fd = os.pidfd_open(self.pids[rank])
                    poll.register(fd, select.EPOLLIN)
                    ranks[fd] = rank
            for fd, _ in poll.poll(_LOOK_S):
                poll.unregister(fd)
                os.close(fd)
                self._note(ranks.pop(fd))
            self._lose()
            self._losses.look(self._world)
            waiting = admissions.waiting(self._world) if self._replaces else []
            if waiting:
                admissions.admit(self._world, waiting)
        self._losses.look(self._world)
        for fd in ranks:
            os.close(fd)
        poll.close()

    def _lose(self) -> None:
        """Count ranks as lost whose processes still live, as those of a node that is cut off."""
        for path in self._folder.glob("*.lost"):
            rank = int(path.stem)
            path.unlink()
            self._world.note_ended(rank, None)
            self._losses.takes(self._world, {rank: LOST})

    def _note(self, rank: int) -> None:
        """A rank that ended otherwise than by SIGKILL has left its result behind, or fails."""
        if rank in self._world.ended:
            return
        was_done = (self._folder / f"{rank}.done").exists()
        code = 0 if was_done else _KILLED
        self._world.note_ended(rank, code)
        self._losses.takes(self._world, {rank: code})
        if self._replaces and code == _KILLED:
            self._make_room(rank)

    def _make_room(self, rank: int) -> None:
        """Put away what a lost rank leaves, so that a process can take its place."""
        del self.pids[rank]
        (self._folder / f"{rank}.pid").unlink()
        folder = self._folder / f"rank_{rank}"
        life = 1 + len(list(folder.glob("lost_*")))
        (folder / "attempt_0").rename(folder / f"lost_{life}")
        self.lost[rank].put(self._losses.admissions.begin(rank, life))


def introduce(folder: Path, rank: int) -> None:
    """Tell the agent of this rank, and have the rank report to it."""
    rank_dir = folder / f"rank_{rank}" / "attempt_0"
    rank_dir.mkdir(parents=True)
    os.environ["ECHELON_RANK_DIR"] = str(rank_dir)
    part = folder / f".{rank}.pid"
    part.write_text(str(os.getpid()))
    part.rename(folder / f"{rank}.pid")


def note_done(folder: Path, rank: int) -> None:
    """Tell the agent that this rank ends by itself."""
    (folder / f"{rank}.done").touch()


@contextlib.contextmanager
def watched(
    folder: Path, world_size: int, *argv: str, on_loss: str = "shrink"
) -> Iterator[tuple[Agent, int]]:
    """Yield an agent and the port of its job's store."""
    with (
        StoreServer("127.0.0.1", 0) as server,
        Agent(folder, world_size, server, *argv, on_loss=on_loss) as agent,
    ):
        yield agent, server.port


def run_replaced(
    fn: Any, world_size: int, folder: Path, *args: Any, lives: dict[int, list[Any]], whole: Any
) -> tuple[list[Any], Agent]:
    """Run ranks of which some are killed and replaced, perhaps repeatedly.

    Args:
        fn: called with the rank, the world's size, `folder`, `args`, and what `lives` has for each
            rank of this call.
        lives: for each of these ranks, an argument per process. All but the last are killed.
        whole: the argument of the other ranks.

    Returns:
        The results of the last process of each rank, and the agent.
    """

    def live(ranks: list[int], life: int, newest: int | None = None) -> list[Any]:
        environ = {"ECHELON_ON_LOSS": "replace"}
        if newest is not None:
            environ |= {"ECHELON_JOIN_AFTER": str(newest), "ECHELON_LIFE": str(life)}
        mine = {rank: lives[rank][life] if rank in lives else whole for rank in ranks}
        codes = {one: _KILLED for one in ranks if one in lives and life + 1 < len(lives[one])}
        return run_ranks(
            fn, world_size, folder, *args, mine, ranks=ranks, store_port=port, exit_codes=codes,
            environ=environ, timeout_s=900.0,
        )  # fmt: skip

    def live_on(rank: int) -> Any:
        found = None
        for life in range(1, len(lives[rank])):
            (found,) = live([rank], life, agent.newest(rank))
        return found

    with (
        watched(folder, world_size, on_loss="replace") as (agent, port),
        ThreadPoolExecutor(1 + len(lives)) as pool,
    ):
        first = pool.submit(live, list(range(world_size)), 0)
        later = {rank: pool.submit(live_on, rank) for rank in lives if len(lives[rank]) > 1}
        found = first.result()
        return [
            later[rank].result() if rank in later else one for rank, one in enumerate(found)
        ], agent


def run_watched(
    fn: Any, world_size: int, folder: Path, *args: Any, exit_codes: dict[int, int]
) -> tuple[list[Any], Agent]:
    """Run ranks under an agent; return what those that are left return, and the agent."""
    with watched(folder, world_size) as (agent, port):
        found = run_ranks(
            fn, world_size, folder, *args, store_port=port, exit_codes=exit_codes,
            environ={"ECHELON_ON_LOSS": "shrink"}, timeout_s=120.0,
        )  # fmt: skip
    return [one for one in found if one is not None], agent


def lose(folder: Path, rank: int) -> None:
    """Have the agent count a rank as lost, whatever its process does."""
    (folder / f"{rank}.lost").touch()


def wait_until_stopped(pid: int, limit_s: float = 60.0) -> None:
    """Wait until a process has been stopped by SIGSTOP."""
    deadline_s = time.monotonic() + limit_s
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        assert time.monotonic() < deadline_s, f"process {pid} has not stopped"
        time.sleep(_LOOK_S)


def wait_for_end(pid: int, limit_s: float = 60.0) -> None:
    """Wait until a process has ended."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        ready, _, _ = select.select([fd], [], [], limit_s)
    finally:
        os.close(fd)
    assert ready, f"process {pid} has not ended"


def pid_of(folder: Path, rank: int, limit_s: float = 60.0) -> int:
    """Return a rank's pid, once it has reported it."""
    deadline_s = time.monotonic() + limit_s
    path = folder / f"{rank}.pid"
    while not path.exists():
        assert time.monotonic() < deadline_s, f"rank {rank} has not reported"
        time.sleep(_LOOK_S)
    return int(path.read_text())
