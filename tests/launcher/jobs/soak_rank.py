"""A rank of the soak: trains a little, and does something wrong if it is its turn.

    soak_rank.py FOLDER SEED NUM_FAULTS [FAULTS]

Attempt k's fault and culprit follow from SEED and k alone. What is about to be done goes to
FOLDER/truth first; the last attempt, after NUM_FAULTS faults, ends well.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

import echelon.dist as dist
from echelon import recorder

NUM_STEPS = 6
WORLD_SIZE = 4  # two nodes of two ranks; only the second node may be lost
IN_ITS_OWN_SESSION = [sys.executable, "-c", "import signal; signal.pause()"]


def parent_of(pid: int) -> int:
    """Return a process's parent."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


# ---- the faults: each ends the rank, or is the end of its node ----


def exits() -> None:
    sys.exit(11)


def exits_at_once() -> None:
    os._exit(12)


def raises() -> None:
    raise ValueError("a bad batch")


def runs_out_of_memory() -> None:
    np.ones(1 << 50)


def is_killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def crashes() -> None:
    ctypes.string_at(8)


def passes_another_shape() -> None:
    dist.world().all_reduce(np.ones(5, np.float32))


def calls_another_operation() -> None:
    dist.world().broadcast(np.ones(4, np.float32), 0)


def leaves_an_orphan() -> None:
    subprocess.Popen(IN_ITS_OWN_SESSION, start_new_session=True)
    os._exit(13)


def leaves_a_fork() -> None:
    if os.fork() == 0:
        os.setsid()
        signal.pause()
    os._exit(14)


def ends_with_a_thread_at_work() -> None:
    threading.Thread(target=signal.pthread_sigmask, args=(signal.SIG_BLOCK, [])).start()
    threading.Thread(target=time.sleep, args=(3600,), daemon=True).start()
    sys.exit(15)


def floods_its_output() -> None:
    for _ in range(200):
        print("x" * 10_000)
    os._exit(16)


def the_store_is_killed() -> None:
    agent = parent_of(os.getppid())
    for pid in Path(f"/proc/{agent}/task/{agent}/children").read_text().split():
        if b"echelon.store" in Path(f"/proc/{pid}/cmdline").read_bytes():
            os.kill(int(pid), signal.SIGKILL)
    os._exit(17)


def its_agent_is_killed() -> None:
    os.kill(parent_of(os.getppid()), signal.SIGKILL)
    signal.pause()


def its_guard_is_killed() -> None:
    os.kill(os.getppid(), signal.SIGKILL)
    signal.pause()


def its_agent_is_frozen() -> None:
    os.kill(parent_of(os.getppid()), signal.SIGSTOP)  # the soak's driver wakes it later
    signal.pause()


def its_whole_node_is_killed() -> None:
    guard = os.getppid()
    agent = parent_of(guard)
    os.kill(guard, signal.SIGSTOP)  # it must not tidy up
    for pid in (agent, guard):
        os.kill(pid, signal.SIGKILL)
    signal.pause()


CAUSES: dict[Callable[[], None], str] = {
    exits: "dead_process",
    exits_at_once: "dead_process",
    raises: "exception",
    runs_out_of_memory: "out_of_memory",
    is_killed: "dead_process",
    crashes: "dead_process",
    passes_another_shape: "shape_mismatch",
    calls_another_operation: "op_mismatch",
    leaves_an_orphan: "dead_process",
    leaves_a_fork: "dead_process",
    ends_with_a_thread_at_work: "dead_process",
    floods_its_output: "dead_process",
    the_store_is_killed: "dead_process",
    its_agent_is_killed: "dead_process",
    its_guard_is_killed: "dead_process",
    its_agent_is_frozen: "dead_process",
    its_whole_node_is_killed: "dead_process",
}
OF_A_NODE = (
    its_agent_is_killed, its_guard_is_killed, its_agent_is_frozen, its_whole_node_is_killed,
)  # fmt: skip
FAULTS = {fault.__name__: fault for fault in CAUSES}


def plan(seed: int, attempt: int, names: list[str]) -> tuple[str, int]:
    """Return the fault of an attempt and the rank that commits it."""
    dice = random.Random(f"{seed}/{attempt}")
    name = dice.choice(names)
    ranks = range(WORLD_SIZE)
    if FAULTS[name] in OF_A_NODE:
        ranks = range(2, WORLD_SIZE)
    elif FAULTS[name] is the_store_is_killed:
        ranks = range(2)  # the store is on the first node
    return name, dice.choice(ranks)


def tell(folder: Path, file: str, **what: object) -> None:
    """Add a line to one of the soak's files."""
    with (folder / file).open("a") as lines:
        lines.write(json.dumps(what) + "\n")


def tell_health(folder: Path, attempt: int) -> None:
    """Note how many threads and descriptors this node's agent and guard have."""
    guard = os.getppid()
    agent = parent_of(guard)
    counts = [
        len(list(Path(f"/proc/{pid}", what).iterdir()))
        for pid in (agent, guard)
        for what in ("task", "fd")
    ]
    tell(folder, "health", attempt=attempt, counts=counts)


def main() -> None:
    """Train, and break."""
    folder, seed, num_faults = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    names = sys.argv[4].split(",") if len(sys.argv) > 4 else list(FAULTS)
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    name, culprit = plan(seed, attempt, names)
    world = dist.init(timeout_s=60)
    assert world.size == WORLD_SIZE
    dice = random.Random(f"{seed}/{attempt}/{world.rank}")
    if dice.random() < 0.2:  # some peers do not go when they are asked to
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if world.rank == 0:
        tell_health(folder, attempt)
    for step in range(NUM_STEPS):
        recorder.step()
        if step == NUM_STEPS // 2 and attempt < num_faults and world.rank == culprit:
            tell(folder, "truth", attempt=attempt, fault=name, rank=culprit)
            FAULTS[name]()
        else:
            world.all_reduce(np.ones(4, np.float32))
    dist.shutdown()


if __name__ == "__main__":
    main()
