"""A program that a standby runs behaves as one that was started now. Real processes, no torch."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from echelon.launcher.attach.ranks import rank_of
from echelon.launcher.node.standby.waiting import Waiting, check_environment, environment
from echelon.launcher.node.workers import Exited, Failed, Started, Swept, Workers

pytestmark = pytest.mark.ranks
_WAIT_S = 120.0

_SHOW = """
import atexit, json, os, sys
import __main__
environ = {name: value for name, value in os.environ.items() if name not in ("_", "LC_CTYPE")}
shown = {
    "argv": sys.argv, "orig_argv": sys.orig_argv, "path": sys.path, "name": __name__,
    "file": __file__, "spec": __spec__ and __spec__.name, "main": __main__.__dict__ is globals(),
    "environ": environ, "cwd": os.getcwd(), "flags": list(sys.flags), "stdin": sys.stdin.read(),
    "policy": os.sched_getscheduler(0), "comm": open("/proc/self/comm").read(),
    "line": open("/proc/self/cmdline").read(), "doc": __doc__, "names": sorted(globals()),
}
atexit.register(print, "last words")
print(json.dumps(shown))
"""
_ENDS = {
    "raise ValueError('bad')": 1,
    "import sys; sys.exit('a message')": 1,
    "raise SystemExit(7)": 7,
    "import os; os._exit(9)": 9,
    "raise KeyboardInterrupt": -signal.SIGINT,
    "this is no Python": 1,
}
_SPAWN = """
import multiprocessing, sys

def square(x):
    return x * x, [path for path in sys.path if path.endswith("standby/hook")]

if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(pool.map(square, [3]))
"""


class _Standby:
    """One standby under a guard of its own."""

    def __init__(
        self, workers: Workers, folder: Path, *argv: str, modules=None, changed=(), **environ: str
    ):
        self.workers, self.folder = workers, folder
        self.environ = {"PATH": os.environ["PATH"], "RANK": "0", **environ}
        listed = folder / "modules.json"
        if modules is not None:
            listed.write_text(json.dumps({"modules": modules, "changed": list(changed)}))
        ours, theirs = socket.socketpair()
        self.argv = [sys.executable, "-u", *argv]
        with theirs:
            pipes = workers.spawn(
                5,
                self.argv,
                environment(self.environ, listed),
                str(folder),
                control=theirs.fileno(),
            )
        self.waiting = Waiting(5, self.environ, None, ours, pipes, time.monotonic())
        self.events: list[object] = []

    def wait_ready(self) -> None:
        deadline_s = time.monotonic() + _WAIT_S
        self.waiting.pid = self.wait_for(Started).pid
        while not self.waiting.is_ready:
            self.waiting.raise_priority()  # at idle priority, a busy machine would not let it run
            ready, _, _ = select.select([self.waiting.control], [], [], 0.2)
            if ready:
                assert self.waiting.hear(), self._drain(1)
            assert time.monotonic() < deadline_s

    def wait_for(self, kind: type):
        deadline_s = time.monotonic() + _WAIT_S
        while not (found := [one for one in self.events if isinstance(one, kind)]):
            if select.select([self.workers.fileno()], [], [], 1.0)[0]:
                self.events += self.workers.events()
            assert time.monotonic() < deadline_s, self.events
        self.events.remove(found[0])
        return found[0]

    def run(self, *, stdin: int | None = None, **environ: str) -> tuple[int, str, str]:
        """Let a rank take it; return exit code, stdout and stderr of the program."""
        if not self.waiting.is_ready:
            self.wait_ready()
        env = {**self.environ, **environ}
        self.workers.take(5, 0, env)
        assert self.wait_for(Started).index == 0
        assert select.select(self.waiting.pipes, [], [], 0)[0] == [], "no output while it waits"
        self.waiting.release(env, str(self.folder), has_stdin=False)
        texts = [self._drain(0), self._drain(1)]
        end = self.wait_for(Exited)
        assert end.index == 0
        return end.code, *texts

    def _drain(self, number: int) -> str:
        with os.fdopen(os.dup(self.waiting.pipes[number])) as file:
            return file.read()

    def plain(self, **environ: str) -> tuple[int, str, str]:
        """Return what the same program does if it is started as usual."""
        done = subprocess.run(
            self.argv, env={**self.environ, **environ}, cwd=self.folder, text=True,
            capture_output=True, check=False, stdin=subprocess.DEVNULL, timeout=_WAIT_S,
        )  # fmt: skip
        return done.returncode, done.stdout, done.stderr


@pytest.fixture
def workers():
    made = Workers()
    yield made
    made.close()


@pytest.fixture
def standby(workers, tmp_path):
    made = []

    def make(text: str, *argv: str, **more) -> _Standby:
        (tmp_path / "train.py").write_text(text)
        made.append(_Standby(workers, tmp_path, *(argv or ("train.py", "--lr", "1")), **more))
        return made[-1]

    yield make
    for one in made:
        one.waiting.close()


@pytest.mark.parametrize("argv", [("train.py", "--lr", "1"), ("-m", "train", "--lr", "1")])
def test_the_program_finds_what_it_always_finds(standby, argv, tmp_path):
    one = standby(_SHOW, *argv, modules=["fractions"], PYTHONPATH=str(tmp_path))
    changed = {"RANK": "1", "ECHELON_RESUME": "/gpt"}
    code, out, err = one.run(**changed)
    expected, expected_out, expected_err = one.plain(**changed)
    assert (code, err) == (expected, expected_err) == (0, "")
    shown, last = out.splitlines()
    expected_shown, expected_last = expected_out.splitlines()
    assert json.loads(shown) == json.loads(expected_shown)
    assert last == expected_last == "last words"


def test_it_has_loaded_what_earlier_ranks_had(standby):
    text = "import sys; print('fractions' in sys.modules, 'no_such_module' in sys.modules)"
    assert standby(text, modules=["no_such_module", "fractions"]).run() == (0, "True False\n", "")


def test_without_a_list_it_has_loaded_what_the_script_imports(standby):
    text = "import sys\nprint('fractions' in sys.modules)\nimport fractions\n"
    assert standby(text).run() == (0, "True\n", "")


@pytest.mark.parametrize(("num_nodes", "is_loaded"), [("1", False), ("2", True)])
def test_on_a_spare_node_it_has_loaded_what_ranks_of_several_nodes_need(
    standby, num_nodes, is_loaded
):
    pytest.importorskip("torch")
    name = "echelon.dist.backends.gloo.transport"
    text = (
        f"import sys\nprint('torch' in sys.modules, {name!r} in sys.modules)\nimport echelon.dist\n"
    )
    made = standby(text, GROUP_WORLD_SIZE=num_nodes)
    assert made.run() == (0, f"{is_loaded} {is_loaded}\n", "")


@pytest.mark.parametrize("text", _ENDS)
def test_it_ends_as_it_always_does(standby, text):
    one = standby(text)
    ended = one.run()
    assert ended[0] == _ENDS[text]
    assert ended == one.plain()


def test_multiprocessing_starts_processes_that_know_nothing_of_it(standby):
    assert standby(_SPAWN).run() == (0, "[(9, [])]\n", "")


_CLEANED_UP = """
import atexit, ctypes, sys

class Library:
    def __del__(self):
        print("cleaned up")

library = Library()
atexit.register(print, "exit handler")
libc = ctypes.CDLL(None)
libc.fdopen.restype = ctypes.c_void_p
log = open("log.txt", "w")
log.write("a line")
libc.fputs(b"from C\\n", ctypes.c_void_p(libc.fdopen(1, b"w")))  # it is buffered
{end}
"""


_IN_THREAD = """
import threading
thread = threading.Thread(target=lambda: 1 / 0)
thread.start()
thread.join()
"""
_CAUGHT = """
try:
    1 / 0
except ZeroDivisionError:
    sys.last_type, sys.last_value, sys.last_traceback = sys.exc_info()
    sys.excepthook(*sys.exc_info())
{then}
"""


@pytest.mark.parametrize("argv", [("train.py",), ("-m", "train")])
def test_a_script_that_failed_ends_without_the_interpreters_clean_up(standby, argv, tmp_path):
    text = _CLEANED_UP.format(end="raise ValueError('bad')")
    one = standby(text, *argv, PYTHONPATH=str(tmp_path))
    code, out, err = one.run()
    assert (code, out) == (1, "exit handler\nfrom C\n")
    assert (tmp_path / "log.txt").read_text() == "a line"
    assert err.endswith("ValueError: bad\n")


@pytest.mark.parametrize(
    "end",
    [
        "pass",
        "sys.exit(3)",
        _CAUGHT.format(then="pass"),
        _CAUGHT.format(then="sys.exit(3)"),
        _IN_THREAD,
        "sys.excepthook = lambda *_: sys.exit(7)\nraise ValueError",
        "raise KeyboardInterrupt",
    ],
)
def test_any_other_script_is_cleaned_up_after_and_keeps_its_code(standby, end):
    one = standby(_CLEANED_UP.format(end=end))
    assert one.run() == one.plain()


def test_a_hook_of_the_users_own_sitecustomize_chooses_the_exit_code(standby, tmp_path):
    own = tmp_path / "site" / "sitecustomize.py"
    own.parent.mkdir()
    own.write_text(
        "import sys\nbefore = sys.excepthook\n"
        "def hook(*error):\n    before(*error)\n    sys.exit(7)\nsys.excepthook = hook\n"
    )
    one = standby("raise ValueError('bad')", modules=[], PYTHONPATH=str(own.parent))
    assert one.run() == one.plain()


def test_variables_of_startup_files_stay(standby, tmp_path):
    library = tmp_path / "site" / "sitecustomize.py"
    library.parent.mkdir()
    library.write_text("import os\nos.environ['SEED'] = '4'\nos.getenv('LOCAL_RANK')\n")
    text = "import os; print(os.environ.get('LC_CTYPE'), os.environ['SEED'])"
    site = str(library.parent)
    one = standby(text, modules=[], PYTHONPATH=site, SEED="1", LOCAL_RANK="0", LC_ALL="")
    one.wait_ready()
    assert not one.waiting.fits({**one.environ, "LOCAL_RANK": "1"}, None), "it has read this one"
    assert one.run(RANK="1") == one.plain(RANK="1")


def test_attach_names_the_rank_that_it_has_become(standby):
    text = (
        "import os\nfrom echelon.launcher.attach.ranks import rank_of\n"
        "one = rank_of(os.getpid())\nprint(one.rank, one.environ['MASTER_PORT'])"
    )
    one = standby(text, modules=[], RANK="0", WORLD_SIZE="2", MASTER_PORT="1")
    assert one.run(RANK="1", MASTER_PORT="2") == (0, "1 2\n", "")


def test_the_programs_files_have_their_usual_numbers(standby):
    text = "import os; print(os.open('/dev/null', os.O_RDONLY))"
    one = standby(text, modules=[])
    assert one.run() == one.plain()


@pytest.mark.parametrize(
    ("text", "is_loaded"),
    [
        ("sys.path.insert(0, 'src')", False),
        ("sys.path[:0] = ['src']", False),
        ("sys.path.append('src')", True),
    ],
)
def test_a_script_that_changes_its_path_loads_everything_itself(standby, text, is_loaded):
    script = f"import sys\nprint('fractions' in sys.modules)\n{text}\nimport fractions\n"
    assert standby(script).run() == (0, f"{is_loaded}\n", "")


def test_another_scheduling_policy_is_kept(tmp_path):
    (tmp_path / "train.py").write_text("import os; print(os.sched_getscheduler(0))")
    policy = os.sched_getscheduler(0)
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    try:
        batch = Workers()
    finally:
        os.sched_setscheduler(0, policy, os.sched_param(0))
    try:
        one = _Standby(batch, tmp_path, "train.py", modules=["fractions"])
        assert one.run() == (0, f"{os.SCHED_BATCH}\n", "")
        one.waiting.close()
    finally:
        batch.close()


def test_a_library_that_a_folder_with_a_program_hides_is_noticed(standby, tmp_path):
    folder = tmp_path / "program"
    folder.mkdir()
    (folder / "__main__.py").write_text("import fractions")
    (folder / "fractions.py").write_text("Fraction = None")
    one = standby("", "program", modules=["fractions"])
    one.wait_ready()
    assert one.waiting.obstacle.startswith(f"{folder / 'fractions.py'} hides")


def test_a_library_that_the_scripts_folder_hides_is_noticed(standby, tmp_path):
    (tmp_path / "fractions.py").write_text("Fraction = None")
    one = standby("import fractions", modules=["fractions"])
    one.wait_ready()
    hides = f"{tmp_path / 'fractions.py'} hides a library that standbys load"
    assert one.waiting.obstacle == hides


_READS = (
    "import os\nos.getenv('THREADS')\nos.getenv('PYTHONPATH')\nos.environ['SET_BY_LIBRARY'] = '1'\n"
)


@pytest.mark.parametrize(
    ("text", "changed", "name"),
    [
        ("", ["HOME", "THREADS"], "THREADS"),
        ("", ["OMP_NUM_THREADS"], "OMP_NUM_THREADS"),
        ("", ["HOME", "RANK", "SET_BY_LIBRARY", "ECHELON_RANK_DIR", "PYTHONPATH"], ""),
        ("import os\nos.environ['OMP_NUM_THREADS'] = '4'\nimport reads", None, "OMP_NUM_THREADS"),
        ("import os\nos.environ.setdefault('MKL_DEBUG', '4')\nimport reads", None, "MKL_DEBUG"),
        ("import os\nos.environ['HOME'] = '/'\nimport reads", None, ""),
    ],
)
def test_a_variable_that_the_program_sets_for_its_libraries_is_noticed(
    standby, tmp_path, text, changed, name
):
    library = tmp_path / "site" / "reads.py"
    library.parent.mkdir()
    library.write_text(_READS)
    listed = {} if changed is None else {"modules": ["reads"], "changed": changed}
    one = standby(text, PYTHONPATH=str(library.parent), **listed)
    one.wait_ready()
    told = f"the program sets {name}, which libraries read when they are loaded"
    assert one.waiting.obstacle == (told if name else "")


def test_what_imports_read_of_the_environment_is_noticed(standby, tmp_path):
    text = "import os\nos.getenv('RANK')\n'LOCAL_RANK' in os.environ\nos.environ['SET'] = '1'\n"
    library = tmp_path / "site" / "reads_rank.py"
    library.parent.mkdir()
    library.write_text(text)
    path = str(library.parent)
    one = standby("import os; print(os.environ['SET'])", modules=["reads_rank"], PYTHONPATH=path)
    one.wait_ready()
    assert one.waiting.fits(one.environ, None)
    assert not one.waiting.fits({**one.environ, "RANK": "1"}, None)
    assert not one.waiting.fits({**one.environ, "LOCAL_RANK": "1"}, None)
    assert one.run() == (0, "1\n", ""), "what an import has set stays set"


def test_a_module_that_fails_or_exits_at_import_does_no_harm(standby, tmp_path):
    (tmp_path / "exits.py").write_text("raise SystemExit(3)")
    one = standby("print(1)", modules=["exits", "3", "x.y"], PYTHONPATH=str(tmp_path))
    assert one.run() == (0, "1\n", "")


def test_an_error_before_a_rank_takes_it_never_runs_the_script(standby, workers, tmp_path):
    (tmp_path / "train.py").write_text("print('ran')")
    argv = (sys.executable, "-u", "train.py")
    env = {**environment({"PATH": os.environ["PATH"]}, tmp_path), "ECHELON_STANDBY": "no JSON"}
    done = subprocess.run(argv, env=env, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    env = check_environment({"PATH": os.environ["PATH"]})
    done = subprocess.run(argv, env=env, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (42, "")


def test_attach_takes_it_for_a_rank_only_once_it_is_one(standby):
    text = (
        "import os\nfrom echelon.launcher.attach.ranks import rank_of\nprint(rank_of(os.getpid()))"
    )
    one = standby(text, RANK="0", WORLD_SIZE="2")
    one.wait_ready()
    assert rank_of(one.waiting.pid) is None
    code, out, err = one.run()
    assert (code, err) == (0, "")
    assert out.startswith("FoundRank(")


def test_it_ends_with_the_agent_and_runs_nothing(standby):
    one = standby("print('ran')")
    one.wait_ready()
    one.waiting.control.close()
    assert one.wait_for(Exited).code == 0
    assert one._drain(0) == ""


def test_it_ends_with_the_guard(standby):
    one = standby("print('ran')")
    one.wait_ready()
    handle = os.pidfd_open(one.waiting.pid)
    try:
        one.workers.close()
        assert select.select([handle], [], [], _WAIT_S)[0] == [handle], "it outlives the guard"
    finally:
        os.close(handle)


def test_one_that_has_ended_cannot_be_taken(standby):
    one = standby("print('ran')")
    one.wait_ready()
    os.kill(one.waiting.pid, signal.SIGKILL)
    assert one.wait_for(Exited).index == 5
    one.workers.take(5, 0, one.environ)
    assert one.wait_for(Failed) == Failed(0, "the standby has ended")


def test_the_sweep_between_two_attempts_spares_it_and_what_its_imports_have_started(
    standby, tmp_path
):
    library = tmp_path / "starts.py"
    library.write_text("import subprocess\nchild = subprocess.Popen(['sleep', '1000'])\n")
    text = "import starts; print(starts.child.poll()); starts.child.kill(); starts.child.wait()"
    one = standby(text, modules=["starts"], PYTHONPATH=str(tmp_path))
    one.wait_ready()
    one.workers.sweep(signal.SIGKILL)
    assert one.wait_for(Swept) == Swept(0, [])
    assert one.run() == (0, "None\n", "")
