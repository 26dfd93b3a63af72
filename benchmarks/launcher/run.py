"""Probe echelon's launcher and torchrun side by side: leftovers, times, and blamed ranks.

    python -m benchmarks.launcher.run                       # every row, about twelve minutes
    python -m benchmarks.launcher.run --only exit_code,agent_killed --rounds 1
    python -m benchmarks.launcher.run --list

Every row is one probe, run in turn under both launchers with the same worker (`launched.py`). Every
probe has a time limit. If torchrun always hits the limit in a row, it runs the row only once.
Without torch, only echelon's column is measured.
"""
# ruff: noqa: D103 -- each probe's row in PROBES says what it does

from __future__ import annotations

import functools
import importlib.util
import itertools
import json
import math
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.launcher import rendezvous
from benchmarks.launcher.launched import Event, Job, job, seconds_until
from benchmarks.launcher.torch_agents import hostile_bytes
from benchmarks.runner.machine import Conditions
from benchmarks.runner.options import finish, parser
from benchmarks.runner.place import ROOT
from benchmarks.runner.rounds import Case, Samples, measure

COLUMNS = tuple((title, "left") for title in ("probe", "torchrun", "echelon", "bar", "met"))
LIMIT_S = 45.0  # how long a probe waits for a reaction
GONE_LIMIT_S = 5.0
CLOCK_OFF_S = 900  # a quarter of an hour
LOST_AFTER_S = 2.5
NEVER = float("inf")
EXECUTED = -1.0
# We hold the meeting open until both nodes are there, however slow the machine is at the moment.
WAIT_FOR_BOTH = ("--rdzv-conf", "last_call_timeout=60")


def is_ready(event: Event) -> bool:
    return event.what == "ready"


# ---- the probes: each returns one figure, infinity for "not within the limit" ----


def agent_killed(made: Job) -> float:
    return _seconds_until_gone(made, "tree", signal.SIGKILL)


def agent_terminated(made: Job) -> float:
    return _seconds_until_gone(made, "tree", signal.SIGTERM)


def sessions_terminated(made: Job) -> float:
    return _seconds_until_gone(made, "forest", signal.SIGTERM)


def _seconds_until_gone(made: Job, mode: str, number: int) -> float:
    agent = made.start(mode)
    made.wait_ready(2)
    agent.process.send_signal(number)
    return seconds_until(lambda: not agent.pids(), GONE_LIMIT_S)


def node_killed(made: Job) -> float:
    return _seconds_to_smaller_world(made, signal.SIGKILL)


def node_silent(made: Job) -> float:
    return _seconds_to_smaller_world(made, signal.SIGSTOP)


def _seconds_to_smaller_world(made: Job, number: int) -> float:
    # As short as it was by default when the bar was set; by default, a node is lost after 15 s.
    conf = f"{WAIT_FOR_BOTH[1]},lost_after={LOST_AFTER_S}"
    options = (WAIT_FOR_BOTH[0], conf) if made.is_ours else ()
    made.start("hold", nproc=1, nodes="1:2", options=options)
    second = made.start("hold", nproc=1, nodes="1:2")
    _wait_for_both(made)
    start_s = time.monotonic()
    second.signal_all(number)
    after = made.wait(1, lambda e: is_ready(e) and e.at_s > start_s and e.world_size == 1, LIMIT_S)
    return after[0].at_s - start_s if after else NEVER


def _wait_for_both(made: Job) -> None:
    if not made.wait(2, lambda e: is_ready(e) and e.world_size == 2, 90.0):
        raise RuntimeError(f"no world of two nodes under {made.launcher}")


def one_of_two(made: Job) -> float:
    agent = made.start("hold", nproc=1, nodes="1:2")
    found = made.wait(1, is_ready, LIMIT_S)
    return found[0].at_s - agent.started_s if found else NEVER


def gloo_restart(made: Job) -> float:
    return float(made.start("gloo", options=("--max-restarts", "1")).end(60.0).code == 0)


def stubborn_peer(made: Job) -> float:
    agent = made.start("stubborn", options=("--max-restarts", "1", "--shutdown-timeout", "2"))
    again = made.wait(1, lambda event: event.what == "again", 60.0)
    said = agent.end(60.0).err
    failing = [event for event in made.events() if event.what == "failing"]
    if not failing:
        raise RuntimeError(f"no rank failed under {made.launcher}:\n{said}")
    return again[0].at_s - failing[0].at_s if again else NEVER


# Every second pair has the later rank first: choosing by rank is right half of the time.
PAIRS = [pair for low in itertools.combinations(range(4), 2) for pair in (low, low[::-1])]


def two_failures(made: Job) -> float:
    first, second = PAIRS[made.round % len(PAIRS)]
    agent = made.start("two_failures", str(first), str(second), nproc=4)
    made.wait_ready(4)
    _write_whole(made.folder / "go", str(time.monotonic() + 0.3))
    said = agent.end(60.0).err
    if made.is_ours:
        verdict = made.report()["incidents"][0]["verdict"]
        return float(verdict is not None and verdict["culprit_ranks"] == [first])
    root = re.search(r"Root Cause.*?rank\s*:\s*(\d+)", said, re.DOTALL)
    return float(root is not None and int(root[1]) == first)


def _write_whole(path: Path, text: str) -> None:
    part = path.with_suffix(".part")
    part.write_text(text)
    part.rename(path)


def exit_code(made: Job) -> float:
    code = made.start("code", "42").end(60.0).code
    return NEVER if code is None else float(code)


def redirect_rank_10(made: Job) -> float:
    program = ("-r", "10:3", "--no-python", "sh", "-c", "echo out")
    ended = made.start("", nproc=11, options=program).end(60.0)
    return float(ended.code == 0 and ended.out.count("out") == 10)


def traceback_shown(made: Job) -> float:
    ended = made.start("raises", options=("-r", "3")).end(60.0)
    return float("no such column" in ended.err)


def clocks_apart(made: Job) -> float:
    library = shifted_clock(made.folder)
    shift = {"LD_PRELOAD": str(library), "CLOCK_SHIFT_S": str(-CLOCK_OFF_S)}
    agents = [
        made.start("end", nproc=1, nodes="2"),
        made.start("end", nproc=1, nodes="2", environ=shift),
    ]
    deadline_s = time.monotonic() + LIMIT_S
    codes = [agent.end(max(0.1, deadline_s - time.monotonic())).code for agent in agents]
    return float(codes == [0, 0])


_CLOCK = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>
static long shift(void) { const char *s = getenv("CLOCK_SHIFT_S"); return s ? atol(s) : 0; }
int clock_gettime(clockid_t id, struct timespec *t) {
    int (*real)(clockid_t, struct timespec *) = dlsym(RTLD_NEXT, "clock_gettime");
    int result = real(id, t);
    if (id == CLOCK_REALTIME) t->tv_sec += shift();
    return result;
}
int gettimeofday(struct timeval *t, void *zone) {
    int (*real)(struct timeval *, void *) = dlsym(RTLD_NEXT, "gettimeofday");
    int result = real(t, zone);
    t->tv_sec += shift();
    return result;
}
"""


def shifted_clock(folder: Path) -> Path:
    """Build a preload library that shifts the wall clock of a process and its descendants."""
    source, library = folder / "clock.c", folder / "clock.so"
    source.write_text(_CLOCK)
    command = ["cc", "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"]
    subprocess.run(command, check=True, capture_output=True)
    return library


def hostile_peer(made: Job) -> float:
    marker = made.folder / "executed"
    options = ("--rdzv-conf", "join_timeout=60") if made.is_ours else ()
    first = made.start("end", nproc=1, nodes="2", options=options)
    seconds_until(lambda: _answers(made.port), 30.0)
    for data in hostile_bytes(marker):
        _pour(made.port, data)
        if made.is_ours:
            store_port = _store_port(first.folder)
            _pour(store_port, data)
            _try_to_write_key(store_port, data)
        else:
            _try_to_write_key(made.port, data)
        seconds_until(marker.exists, 3.0)  # who waits looks at the key about once a second
    second = made.start("end", nproc=1, nodes="2")
    codes = [first.end(30.0).code, second.end(30.0).code]
    return EXECUTED if marker.exists() else float(codes == [0, 0])


def _answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _pour(port: int, data: bytes) -> None:
    """Write bytes to a port, like a client that does not implement the protocol."""
    with socket.socket() as peer:
        peer.settimeout(2)
        try:
            peer.connect(("127.0.0.1", port))
            peer.sendall(data)
            peer.recv(100)
        except OSError:
            return  # hung up on, which is an answer too


def _store_port(folder: Path) -> int:
    return int(json.loads((folder / "run/job.json").read_text())["endpoint"].rpartition(":")[2])


def _try_to_write_key(port: int, data: bytes) -> None:
    """Set torch's rendezvous key, if torch is installed; ignore a refusal."""
    code = (
        "import sys; from benchmarks.launcher.torch_agents import write_key; "
        "write_key(int(sys.argv[1]), 'torch.rendezvous.bench', bytes.fromhex(sys.argv[2]))"
    )
    subprocess.run(
        [sys.executable, "-c", code, str(port), data.hex()],
        cwd=ROOT, check=False, capture_output=True, timeout=60,
    )  # fmt: skip


def meet(num_agents: int, limit_s: float) -> Callable[[Job], float]:
    """Return the probe of a rendezvous of simulated agents, under either launcher."""

    def probe(made: Job) -> float:
        if made.is_ours:
            return rendezvous.in_fresh_process(num_agents)[0]
        script = Path(__file__).with_name("torch_agents.py")
        done = subprocess.run(
            [sys.executable, str(script), str(num_agents), str(limit_s)],
            capture_output=True, text=True, check=True, timeout=limit_s + 120,
        )  # fmt: skip
        return float(done.stdout.split()[-1])

    return probe


# ---- the rows ----


def seconds(limit_s: float) -> Callable[[Sequence[float]], str]:
    """Return a function that formats a row of times as their median."""

    def tell(values: Sequence[float]) -> str:
        middle = statistics.median(values)
        return f"none in {limit_s:g} s" if math.isinf(middle) else f"{middle:.2f} s"

    return tell


def count(values: Sequence[float]) -> str:
    return f"{int(sum(values))} of {len(values)}"


def codes(values: Sequence[float]) -> str:
    return ", ".join(str(int(value)) for value in sorted(set(values)))


def hostile(values: Sequence[float]) -> str:
    if EXECUTED in values:
        return "executed"
    return "not executed, " + ("the job succeeded" if every_time(values) else "but the job failed")


# Whether a bar is met, by our figures and torchrun's.
Bar = Callable[[Sequence[float], Sequence[float]], bool]


def within(limit_s: float) -> Bar:
    return lambda ours, _: statistics.median(ours) <= limit_s


def as_fast(ours: Sequence[float], peer: Sequence[float]) -> bool:
    return not peer or statistics.median(ours) <= statistics.median(peer)


def every_time(ours: Sequence[float], _: Sequence[float] = ()) -> bool:
    return all(value == 1.0 for value in ours)


@dataclass(frozen=True, kw_only=True)
class Probe:
    """One row of the table."""

    name: str
    title: str
    run: Callable[[Job], float]
    bar: str
    tell: Callable[[Sequence[float]], str]
    is_met: Bar
    rounds: int = 3
    peer_rounds: int | None = None  # None: as many as ours; 0: not measured

    def needs(self) -> str:
        """Return what is missing to run the probe, or "" if nothing is."""
        missing = self.name == "clocks_apart" and shutil.which("cc") is None
        return "a C compiler" if missing else ""


PROBES = (
    Probe(
        name="agent_killed", title="agent killed with SIGKILL: until no worker is left",
        run=agent_killed, bar="2 s", tell=seconds(GONE_LIMIT_S), is_met=within(2.0),
    ),
    Probe(
        name="agent_terminated", title="agent SIGTERM: until workers and grandchildren are gone",
        run=agent_terminated, bar="as fast", tell=seconds(GONE_LIMIT_S), is_met=as_fast,
    ),
    Probe(
        name="sessions_terminated", title="the same with grandchildren in sessions of their own",
        run=sessions_terminated, bar="as fast", tell=seconds(GONE_LIMIT_S), is_met=as_fast,
    ),
    Probe(
        name="node_killed", title="a node is killed (`--nnodes 1:2`): until the new world",
        run=node_killed, bar="5 s", tell=seconds(LIMIT_S), is_met=within(5.0), peer_rounds=1,
    ),
    Probe(
        name="node_silent",
        title="a node is stopped by SIGSTOP, echelon with `lost_after=2.5`: until the new world",
        run=node_silent, bar="5 s", tell=seconds(LIMIT_S), is_met=within(5.0), peer_rounds=1,
    ),
    Probe(
        name="one_of_two", title="`--nnodes 1:2`, one node present: until the first worker",
        run=one_of_two, bar="3 s", tell=seconds(LIMIT_S), is_met=within(3.0), peer_rounds=1,
    ),
    Probe(
        name="gloo_restart", title="restart after a failure (Gloo, `--max-restarts 1`) succeeds",
        run=gloo_restart, bar="8 of 8", tell=count, is_met=every_time, rounds=8,
    ),
    Probe(
        name="stubborn_peer",
        title="restart while a peer ignores SIGTERM, `--shutdown-timeout 2`",
        run=stubborn_peer, bar="about 2 s", tell=seconds(60.0), is_met=within(4.0), peer_rounds=1,
    ),
    Probe(
        name="two_failures", title="two failures 50 ms apart: the right root cause",
        run=two_failures, bar="every time", tell=count, is_met=every_time, rounds=12,
    ),
    Probe(
        name="exit_code", title="exit code when a worker exits with 42", run=exit_code, bar="42",
        tell=codes, is_met=lambda ours, _: set(ours) == {42.0}, rounds=1,
    ),
    Probe(
        name="redirect_rank_10", title="`-r 10:3` with 11 ranks works", run=redirect_rank_10,
        bar="works", tell=count, is_met=every_time, rounds=1,
    ),
    Probe(
        name="traceback_shown", title="traceback in the final report, nothing in the user's code",
        run=traceback_shown, bar="always", tell=count, is_met=every_time,
    ),
    Probe(
        name="hostile_peer",
        title="a stranger writes a pickle and garbage to the rendezvous",
        run=hostile_peer, bar="never unpickled", tell=hostile, is_met=every_time, rounds=1,
    ),
    Probe(
        name="clocks_apart", title="wall clocks of two nodes 15 min apart: ends well",
        run=clocks_apart, bar="no wall clock", tell=count, is_met=every_time, peer_rounds=1,
    ),
    Probe(
        name="meet_256", title="rendezvous of 256 agents", run=meet(256, 60.0), bar="faster",
        tell=seconds(60.0), is_met=as_fast, peer_rounds=1,
    ),
    Probe(
        name="meet_512", title="rendezvous of 512 agents", run=meet(512, 120.0), bar="faster",
        tell=seconds(120.0), is_met=as_fast, peer_rounds=1,
    ),
    Probe(
        name="meet_1024", title="rendezvous of 1024 agents", run=meet(1024, 0.0), bar="2 s",
        tell=seconds(120.0), is_met=within(2.0), peer_rounds=0,
    ),
)  # fmt: skip


def as_case(probe: Probe, launchers: Sequence[str], rounds: int | None) -> Case:
    """Return the runner's case for a row: its probe under each launcher."""

    def run(launcher: str, number: int) -> float:
        with job(launcher, number) as made:
            figure = probe.run(made)
        print(f"{probe.name} {launcher}: {figure:.3g}", file=sys.stderr, flush=True)
        return figure

    peer = probe.rounds if probe.peer_rounds is None else probe.peer_rounds
    return Case(
        name=probe.name,
        sides={launcher: functools.partial(run, launcher) for launcher in launchers},
        rounds=rounds or probe.rounds,
        side_rounds={"torchrun": peer},
    )


def row_of(probe: Probe, samples: Samples) -> list[str]:
    """Return a row of the table."""
    if missing := probe.needs():
        return [probe.title, f"not run: needs {missing}", "", probe.bar, ""]
    ours, peer = samples["ours"], samples.get("torchrun", [])
    met = "yes" if probe.is_met(ours, peer) else "**no**"
    return [probe.title, probe.tell(peer) if peer else "-", probe.tell(ours), probe.bar, met]


def main() -> None:
    """Run the probes and print the table."""
    arguments = parser(__doc__, rounds=None)
    arguments.add_argument("--only", default="", metavar="NAMES", help="these rows, with commas")
    arguments.add_argument("--list", action="store_true", help="name the rows")
    args = arguments.parse_args()
    if args.list:
        print("\n".join(f"{probe.name:18} {probe.title}" for probe in PROBES))
        return
    wanted = set(filter(None, args.only.split(",")))
    unknown = wanted - {probe.name for probe in PROBES}
    if unknown:
        arguments.error(f"no such row: {', '.join(sorted(unknown))}; see --list")
    launchers = ["ours"] + (["torchrun"] if importlib.util.find_spec("torch") else [])
    chosen = [probe for probe in PROBES if not wanted or probe.name in wanted]
    cases = [as_case(one, launchers, args.rounds) for one in chosen if not one.needs()]
    conditions = Conditions(("torch",))
    num_rounds = max((case.rounds or 1 for case in cases), default=0)
    samples = measure(cases, num_rounds, seed=args.seed)
    rows = [row_of(probe, samples.get(probe.name, {})) for probe in chosen]
    finish(args, conditions, COLUMNS, rows, samples)


if __name__ == "__main__":
    main()
