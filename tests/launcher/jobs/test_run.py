"""`echelon run` with real workers: it ends, stops, stalls, restarts, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import os
import pty
import signal
import subprocess
import sys
import textwrap

import pytest

from echelon.launcher.node.guard import descendants
from echelon.recorder.format.schema import Live
from echelon.recorder.read import read
from tests.launcher.background import Node
from tests.launcher.cluster import left, marked
from tests.support.ranks import read_json, run_echelon

pytestmark = pytest.mark.ranks


@pytest.fixture
def script(tmp_path):
    def write(code: str) -> str:
        path = tmp_path / "train.py"
        path.write_text(textwrap.dedent(code))
        return str(path)

    return write


@pytest.fixture
def run_dir(tmp_path):
    return tmp_path / "run"


@pytest.fixture
def start(run_dir):
    """Start a job in the background."""
    started: list[Node] = []

    def begin(*options: str) -> Node:
        started.append(Node(run_dir, options))
        return started[-1]

    yield begin
    for job in started:
        job.close()


def test_a_good_job_exits_0_without_an_incident(script, run_dir):
    done = run_echelon(
        "run", "--nproc-per-node", "2", "--run-dir", str(run_dir),
        script(
            """
            import os, sys
            import echelon.dist as dist
            import numpy as np
            world = dist.init(timeout_s=30)
            x = np.full(3, world.rank + 1.0)
            world.all_reduce(x)
            print("sum", x[0], os.environ["LOCAL_WORLD_SIZE"], sys.argv[1:])
            dist.shutdown()
            """
        ),
        "--flag", "value",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = sorted(done.stdout.splitlines())
    assert lines == [f"{rank}| sum 3.0 2 ['--flag', 'value']" for rank in range(2)]
    assert not (run_dir / "dump").exists()
    report = read_json(run_dir / "report.json")
    assert (report["ended_by"], report["exit_code"], report["incidents"]) == ("worker", 0, [])
    assert (
        run_dir / "rank_1/attempt_0/stdout.log"
    ).read_text() == "sum 3.0 2 ['--flag', 'value']\n"
    assert (run_dir / "rank_1/attempt_0/ring").exists()
    assert (run_dir / "job.json").stat().st_mode & 0o777 == 0o600


def test_workers_get_torchruns_environment(script, run_dir):
    done = run_echelon(
        "run", "--nproc-per-node", "2", "--rdzv-id", "job7", "--run-dir", str(run_dir),
        script(
            """
            import os
            names = '''RANK LOCAL_RANK GROUP_RANK ROLE_RANK ROLE_NAME WORLD_SIZE LOCAL_WORLD_SIZE
            GROUP_WORLD_SIZE ROLE_WORLD_SIZE MASTER_ADDR MASTER_PORT TORCHELASTIC_RESTART_COUNT
            TORCHELASTIC_MAX_RESTARTS TORCHELASTIC_RUN_ID TORCHELASTIC_USE_AGENT_STORE
            TORCHELASTIC_ERROR_FILE TORCH_NCCL_ASYNC_ERROR_HANDLING OMP_NUM_THREADS'''.split()
            missing = [name for name in names if name not in os.environ]
            assert not missing, missing
            print(os.environ["RANK"], os.environ["TORCHELASTIC_RUN_ID"])
            """
        ),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["0| 0 job7", "1| 1 job7"]


def test_the_secret_is_in_no_argument_and_no_log_and_gone_afterwards(script, run_dir, tmp_path):
    done = run_echelon(
        "run", "--nproc-per-node", "1", "--run-dir", str(run_dir),
        script(
            """
            import json, os, pathlib, sys
            secret = json.loads(pathlib.Path(os.environ["ECHELON_JOB_FILE"]).read_text())["secret"]
            pathlib.Path(sys.argv[1]).write_text(secret)
            assert len(secret) == 64
            for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
                try:
                    assert secret.encode() not in path.read_bytes(), path
                except OSError:
                    pass
            assert not any(secret in value for value in os.environ.values())
            """
        ),
        str(tmp_path / "secret"),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    secret = (tmp_path / "secret").read_bytes()
    files = [path for path in run_dir.rglob("*") if path.is_file()]
    assert files
    assert not any(secret in path.read_bytes() for path in files)


def test_the_jobs_exit_code_is_the_workers_own(script, run_dir):
    done = run_echelon(
        "run", "--nproc-per-node", "3", "--run-dir", str(run_dir),
        script(
            """
            import os, signal, sys
            if os.environ["RANK"] == "1":
                sys.exit(42)
            signal.pause()
            """
        ),
    )  # fmt: skip
    assert done.returncode == 42, done.stderr
    report = read_json(run_dir / "report.json")
    assert report["ended_by"] == "worker"
    (incident,) = report["incidents"]
    assert incident["verdict"]["cause"] == "dead_process"
    assert incident["verdict"]["culprit_ranks"] == [1]
    assert incident["victims"] == {"failed": [], "stopped": [0, 2]}
    assert "also stopped by the launcher: ranks 0 and 2" in done.stderr.partition("VERDICT")[2]
    assert {path.name for path in (run_dir / "dump/latest").glob("rank_*")} == {
        "rank_0", "rank_1", "rank_2",
    }  # fmt: skip


def test_an_exception_before_any_ring_is_explained_from_stderr(script, run_dir):
    done = run_echelon(
        "run", "--nproc-per-node", "2", "--run-dir", str(run_dir),
        script(
            """
            import os, signal
            def load():
                raise KeyError("no such column")
            if os.environ["RANK"] == "1":
                load()
            signal.pause()
            """
        ),
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    verdict = read_json(run_dir / "dump/latest/verdict.json")["verdict"]
    assert (verdict["cause"], verdict["culprit_ranks"]) == ("exception", [1])
    assert "train.py:4" in verdict["summary"]


def test_what_a_program_says_in_its_error_file_is_told(script, run_dir):
    done = run_echelon(
        "run", "--nproc-per-node", "1", "--run-dir", str(run_dir),
        script(
            """
            import json, os
            trace = "Traceback (most recent call last):\\n  File 't.py'\\nE: by file\\n"
            message = {"message": "E: by file", "extraInfo": {"py_callstack": trace}}
            with open(os.environ["TORCHELASTIC_ERROR_FILE"], "w") as file:
                json.dump({"message": message}, file)
            os._exit(1)
            """
        ),
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    (incident,) = read_json(run_dir / "report.json")["incidents"]
    assert incident["verdict"]["cause"] == "exception"
    assert incident["root_cause"]["traceback"][-1] == "E: by file"


def test_who_ignores_sigterm_is_killed_with_all_it_started(script, run_dir, monkeypatch):
    mark = f"ECHELON_TEST_MARK={os.getpid()}-stubborn"
    monkeypatch.setenv(*mark.split("="))
    done = run_echelon(
        "run", "--nproc-per-node", "2", "--shutdown-timeout", "0.5", "--run-dir", str(run_dir),
        script(
            """
            import os, signal, subprocess, sys
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"],
                             start_new_session=True)
            if os.environ["RANK"] == "0":
                sys.exit(3)
            signal.pause()
            """
        ),
    )  # fmt: skip
    assert done.returncode == 3, done.stderr
    assert left(mark) == []


def test_streams_are_redirected_filtered_and_kept_where_asked(script, run_dir, tmp_path):
    done = run_echelon(
        "run", "--nproc-per-node", "3", "-r", "0:3,1-2:2", "--local-ranks-filter", "0,1",
        "--log-dir", str(tmp_path / "logs"), "--duplicate-stderr-filters", "bad", "--run-dir",
        str(run_dir),
        script("import sys; print('out'); print('a bad thing', file=sys.stderr)"),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout == "1| out\n"
    assert "bad" not in done.stderr
    (job,) = (tmp_path / "logs").iterdir()
    assert (job / "attempt_0/2/stdout.log").read_text() == "out\n"
    assert (job / "attempt_0/filtered_stderr.log").read_text() == "a bad thing\n" * 3
    assert not (run_dir / "rank_0/attempt_0/stdout.log").exists()


def test_the_chosen_rank_reads_the_launchers_input_and_no_other(run_dir):
    done = subprocess.run(
        [sys.executable, "-m", "echelon", "run", "--nproc-per-node", "2", "--stdin-rank", "1",
         "--run-dir", str(run_dir), "--no-python", "sh", "-c", 'read line; echo "got $line"'],
        input="a config\n", capture_output=True, text=True, check=False, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["0| got ", "1| got a config"]


def test_a_stall_is_reported_once_and_its_end_is_noted(script, run_dir):
    done = run_echelon(
        "run", "--nproc-per-node", "2", "--stall-timeout", "3", "--run-dir", str(run_dir),
        script(
            """
            import os, pathlib, select
            import numpy as np
            import echelon.dist as dist
            world = dist.init(timeout_s=60)
            world.barrier()
            def load_table():
                latest = pathlib.Path(os.environ["ECHELON_RANK_DIR"]).parents[1] / "dump/latest"
                while not (latest / "verdict.json").exists():
                    select.select([], [], [], 0.05)
            if world.rank == 1:
                load_table()
            world.barrier()
            dist.shutdown()
            """
        ),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (incident,) = read_json(run_dir / "report.json")["incidents"]
    assert (incident["kind"], incident["recovered"]) == ("stall", True)
    assert (incident["verdict"]["cause"], incident["verdict"]["culprit_ranks"]) == (
        "host_hang",
        [1],
    )
    assert "load_table" in incident["verdict"]["summary"]
    assert done.stderr.count("VERDICT") == 1


def test_a_stall_before_init_counts_after_five_times_the_limit(script, run_dir):
    done = run_echelon(
        "run", "--stall-timeout", "0.3", "--on-stall", "stop", "--run-dir", str(run_dir),
        script("import signal; signal.pause()"),
    )  # fmt: skip
    assert done.returncode == 3, done.stderr
    report = read_json(run_dir / "report.json")
    assert report["ended_by"] == "stall"
    assert report["incidents"][0]["reason"] == "no rank reached init for 1.5 s"


def test_a_job_starts_again_and_a_used_run_directory_is_kept(script, run_dir):
    program = script(
        """
        import os, sys
        import echelon.dist as dist
        world = dist.init(timeout_s=30)
        world.barrier()
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            sys.exit(9)
        print("attempt", os.environ["ECHELON_ATTEMPT"])
        dist.shutdown()
        """
    )
    argv = ["run", "--nproc-per-node", "2", "--max-restarts", "1", "--run-dir", str(run_dir)]
    done = run_echelon(*argv, program)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["0| attempt 1", "1| attempt 1"]
    report = read_json(run_dir / "report.json")
    assert report["attempts"] == 2
    assert [incident["recovered"] for incident in report["incidents"]] == [True]
    done = run_echelon(*argv, program)
    assert sorted(done.stdout.splitlines()) == ["0| attempt 3", "1| attempt 3"]
    assert {path.name for path in (run_dir / "dump").glob("incident_*")} == {
        "incident_0", "incident_1",
    }  # fmt: skip


def test_a_program_that_cannot_be_run_is_said_in_one_line(run_dir):
    done = run_echelon("run", "--no-python", "--run-dir", str(run_dir), "/no/such/program")
    assert done.returncode == 127, done.stderr
    assert "rank 0: cannot start /no/such/program: No such file or directory" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("argv", [["no_such_script.py"], ["--nproc-per-node", "0", "x.py"]])
def test_bad_usage_is_one_line_and_exit_code_2(argv):
    done = run_echelon("run", *argv)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""


_WAITING = """
import pathlib, os, signal, sys
def leave(number, frame):
    print("got", signal.Signals(number).name, flush=True)
    if number != signal.SIGUSR1:
        sys.exit(0)
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
    signal.signal(number, leave)
print("ready", flush=True)
while True:
    signal.pause()
"""


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)], ids=["TERM", "INT"]
)
def test_a_signal_reaches_the_workers_and_ends_the_job(script, start, run_dir, number, code):
    job = start("--nproc-per-node", "2", script(_WAITING))
    job.wait_for("ready", 2)
    job.process.send_signal(signal.SIGUSR1)
    job.wait_for("got SIGUSR1", 2)
    job.process.send_signal(number)
    assert job.end() == code, job.lines
    assert not job.has("died; ending all processes that it started")
    assert sum(f"got {number.name}" in line for line in job.lines) == 2
    report = read_json(run_dir / "report.json")
    assert (report["ended_by"], report["incidents"]) == ("signal", [])


def test_nothing_outlives_an_agent_that_is_killed(script, start, run_dir, monkeypatch):
    mark = f"ECHELON_TEST_MARK={os.getpid()}-killed"
    monkeypatch.setenv(*mark.split("="))
    job = start(
        "--nproc-per-node", "2",
        script(
            "import subprocess, sys\n"
            "from echelon import recorder; recorder.step()\n"
            "subprocess.Popen([sys.executable, '-c', 'import signal; signal.pause()'],"
            " start_new_session=True)\n" + _WAITING
        ),
    )  # fmt: skip
    job.wait_for("ready", 2)
    assert len(marked(mark)) >= 5  # agent, guard, store, workers and what they started
    (link,) = (run_dir / "rank_0/attempt_0").glob("ring")
    in_memory = link.resolve()
    job.process.kill()
    job.end()
    line = f"the launcher (pid {job.process.pid}) died; ending all processes that it started"
    assert sum(line in printed for printed in job.lines) == 1, job.lines
    assert left(mark) == []
    assert read(link).live[Live.STEP] == 1
    assert not link.is_symlink()
    assert in_memory == link or not in_memory.parents[1].exists()


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&-", ">&- 2>&- <&-"])
def test_closed_standard_streams_do_not_end_a_job(script, run_dir, closed):
    command = f'exec "$@" {closed}'
    done = subprocess.run(
        ["sh", "-c", command, "sh", sys.executable, "-m", "echelon", "run", "--run-dir",
         str(run_dir), script("print('hello')")],
        capture_output=True, text=True, check=False, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (run_dir / "rank_0/attempt_0/stdout.log").read_text() == "hello\n"


def test_nothing_outlives_a_guard_that_is_killed(script, run_dir, monkeypatch):
    mark = f"ECHELON_TEST_MARK={os.getpid()}-guard"
    monkeypatch.setenv(*mark.split("="))
    done = run_echelon(
        "run", "--nproc-per-node", "2", "--run-dir", str(run_dir),
        script(
            """
            import os, signal, subprocess, sys
            from echelon import recorder
            recorder.step()
            subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"],
                             start_new_session=True)
            if os.environ["RANK"] == "0":
                os.kill(os.getppid(), signal.SIGKILL)
            signal.pause()
            """
        ),
    )  # fmt: skip
    assert read(run_dir / "rank_0/attempt_0/ring").live[Live.STEP] == 1
    assert not (run_dir / "rank_0/attempt_0/ring").is_symlink()
    assert done.returncode == 1, done.stderr
    assert "the guard process died" in done.stderr
    assert read_json(run_dir / "report.json")["ended_by"] == "agent"
    assert left(mark) == []


def test_a_stopped_worker_is_named_and_ended(script, run_dir):
    done = run_echelon(
        "run", "--nproc-per-node", "3", "--stall-timeout", "3", "--on-stall", "stop",
        "--run-dir", str(run_dir),
        script(
            """
            import os, signal
            import echelon.dist as dist
            world = dist.init(timeout_s=60)
            world.barrier()
            if world.rank == 2:
                os.kill(os.getpid(), signal.SIGSTOP)
            world.barrier()
            """
        ),
    )  # fmt: skip
    assert done.returncode == 3, done.stderr
    verdict = read_json(run_dir / "dump/latest/verdict.json")["verdict"]
    assert (verdict["cause"], verdict["culprit_ranks"]) == ("frozen_process", [2])


def test_after_agent_and_guard_were_killed_together_the_next_launcher_clears_up(
    script, start, run_dir
):
    job = start(
        "--nproc-per-node", "1",
        script("from echelon import recorder; recorder.step()\n" + _WAITING),
    )  # fmt: skip
    job.wait_for("ready", 1)
    link = run_dir / "rank_0/attempt_0/ring"
    if not link.is_symlink():
        job.process.terminate()
        job.end()
        pytest.skip("rings do not lie in memory here")
    memory = link.resolve().parents[1]
    everything = descendants(job.process.pid)
    job.process.send_signal(signal.SIGSTOP)  # it must not clear up either
    for pid in [*everything, job.process.pid]:
        os.kill(pid, signal.SIGKILL)
    job.end()
    assert link.is_symlink()
    other = run_dir.with_name("other")
    assert run_echelon("run", "--run-dir", str(other), script("")).returncode == 0
    assert read(link).live[Live.STEP] == 1
    assert not link.is_symlink()
    assert not memory.exists()


def test_a_launcher_does_not_clear_up_where_another_works(script, start, run_dir):
    job = start(
        "--nproc-per-node", "1",
        script("from echelon import recorder; recorder.step()\n" + _WAITING),
    )  # fmt: skip
    job.wait_for("ready", 1)
    memory = (run_dir / "rank_0/attempt_0/ring").resolve()
    other = run_dir.with_name("other")
    assert run_echelon("run", "--run-dir", str(other), script("")).returncode == 0
    assert memory.exists()
    job.process.terminate()
    job.end()


def test_workers_are_bound_and_see_their_own_gpu(script, run_dir, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    program = script(
        """
        import os
        print(os.environ["LOCAL_RANK"], os.environ["CUDA_VISIBLE_DEVICES"],
              sorted(os.sched_getaffinity(0)))
        """
    )
    argv = ["run", "--nproc-per-node", "2", "--run-dir", str(run_dir), "--virtual-local-rank"]
    binding = "exclusive" if len(os.sched_getaffinity(0)) > 1 else "node"
    done = run_echelon(*argv, "--numa-binding", binding, program)
    assert done.returncode == 0, done.stderr
    lines = sorted(line.partition("| ")[2] for line in done.stdout.splitlines())
    assert [line.split(" [")[0] for line in lines] == ["0 4", "0 7"]
    bound = [set(map(int, line.partition("[")[2].strip("]").split(","))) for line in lines]
    assert f"--numa-binding {binding}: " in done.stderr
    assert all(cpus <= os.sched_getaffinity(0) for cpus in bound)
    if binding == "exclusive":
        assert not bound[0] & bound[1]
    done = run_echelon(*argv, "--nproc-per-node", "3", program)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "has no GPU for local rank 2" in done.stderr


def test_signals_that_were_not_asked_for_are_passed_on_or_left_alone(script, start):
    job = start("--signals-to-handle", "SIGTERM,SIGUSR2", script(_WAITING))
    job.wait_for("ready", 1)
    job.process.send_signal(signal.SIGUSR1)
    job.wait_for("got SIGUSR1", 1)
    job.process.send_signal(signal.SIGHUP)
    assert job.end() == -signal.SIGHUP, "not handled: the launcher has the default action"


def test_an_attempt_finds_nothing_of_the_one_before_in_the_store(script, run_dir):
    done = run_echelon(
        "run", "--max-restarts", "1", "--run-dir", str(run_dir),
        script(
            """
            import os, sys
            from echelon.store import TCPStore
            store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]),
                             timeout=20.0)
            print("keys", store.num_keys(), flush=True)
            store.set("left", b"x")
            assert store.get("left") == b"x"
            sys.exit(0 if os.environ["TORCHELASTIC_RESTART_COUNT"] == "1" else 9)
            """
        ),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["0| keys 0", "0| keys 0"]


def test_the_launcher_does_not_speak_at_the_end_of_a_live_line(script, run_dir):
    ours, theirs = pty.openpty()
    program = script("import sys; print('50 %', end='\\r', flush=True); sys.exit(7)")
    argv = [sys.executable, "-m", "echelon", "run", "--run-dir", str(run_dir), program]
    job = subprocess.Popen(argv, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    shown = b""
    with contextlib.suppress(OSError):  # how a terminal says that nobody is there any more
        while piece := os.read(ours, 65536):
            shown += piece
    os.close(ours)
    assert job.wait(600) == 7
    before, said, _ = shown.partition(b"echelon: failure")
    assert said
    assert b"50 %" in before
    assert before.endswith((b"\n", b"\r\x1b[2K", b"\r\x1b[K")), shown


def test_a_store_that_was_killed_is_replaced_at_the_next_start(script, run_dir):
    done = run_echelon(
        "run", "--nproc-per-node", "2", "--max-restarts", "1", "--run-dir", str(run_dir),
        script(
            """
            import os, pathlib, signal, sys
            import echelon.dist as dist
            world = dist.init(timeout_s=30)
            world.barrier()
            if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
                agent = int(pathlib.Path(f"/proc/{os.getppid()}/stat").read_text().split()[3])
                children = pathlib.Path(f"/proc/{agent}/task/{agent}/children").read_text()
                for pid in children.split() if world.rank == 0 else []:
                    if b"echelon.store" in pathlib.Path(f"/proc/{pid}/cmdline").read_bytes():
                        os.kill(int(pid), signal.SIGKILL)
                        print("killed it", flush=True)
                sys.exit(9)
            print("met again")
            dist.shutdown()
            """
        ),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (done.stdout.count("killed it"), done.stdout.count("met again")) == (1, 2)


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 200 kB, where one may be mounted."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=200k", "tmpfs", str(folder)]
    try:
        subprocess.run(mount, check=True, capture_output=True, timeout=20)
    except (OSError, subprocess.SubprocessError) as err:
        pytest.skip(f"nothing can be mounted here: {err}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True, timeout=20)


@pytest.mark.netns
def test_a_full_disk_ends_no_job(script, small_disk):
    program = script(
        """
        import sys
        for _ in range(2000):
            print("x" * 200)
        print("done")
        sys.exit(int(sys.argv[1]))
        """
    )
    done = run_echelon("run", "--run-dir", str(small_disk / "run"), program, "0")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") == 2001, "what is not kept is shown all the same"
    assert done.stderr.count("cannot write log files (No space left on device)") == 1
    assert "Traceback" not in done.stderr
    done = run_echelon("run", "--run-dir", str(small_disk / "run"), program, "7")
    assert "Traceback" not in done.stderr, done.stderr
    assert done.returncode in (2, 7), done.stderr  # whether there is room for a folder is chance
    report = small_disk / "run/report.json"
    assert not report.exists() or read_json(report)["exit_code"] == 7, "the first job's success"


@pytest.mark.slow
def test_three_hundred_local_ranks_start_run_and_stop(start):
    code = "trap 'exit 0' TERM; echo up; while :; do sleep 1; done"
    job = start("--nproc-per-node", "300", "--no-python", "sh", "-c", code)
    job.wait_for("| up", 300)
    job.process.send_signal(signal.SIGTERM)
    assert job.end() == 143, job.lines[-20:]
    assert read_json(job.run_dir / "report.json")["ended_by"] == "signal"
