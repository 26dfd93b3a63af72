"""A run that is killed goes on by itself: no sample is left out or seen twice."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from gpt.flags import build_parser, read_settings
from gpt.job import prepare
from gpt.training.loop import Trainer

import echelon.dist as dist
from tests.examples.runs import EXAMPLES, INHERITED, LIMIT_S, SMALL_MODEL, read_log

SCRIPT = EXAMPLES / "train_gpt.py"
BATCH = 12  # of 1 to 4 ranks
pytestmark = pytest.mark.ranks


class Job:
    """A job under `echelon run` whose ranks can be killed; its log says how far it is."""

    def __init__(self, folder: Path, *, num_steps: int, every: int) -> None:
        self.log, self.folder, self.num_runs = folder / "log", folder, 0
        text = folder / "text"
        lines = (b"def f_%d(x):\n    return x + %d\n" % (n, n) for n in range(4000))
        text.write_bytes(b"".join(lines))
        self.model = (*SMALL_MODEL, f"--batch={BATCH}", "--lr=0.003", f"--steps={num_steps}")
        self.model += ("--data", str(text))
        self.files = ("--log", str(self.log), "--checkpoint", str(folder / "gpt"))
        self.files += (f"--checkpoint-every={every}", "--resume=auto")
        self.files += ("--set", "checkpoint.patience_s=0")  # no checkpoint is skipped

    def start(self, num_ranks: int, *script: str | Path, restarts: int) -> None:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(INHERITED)}
        self.num_runs += 1
        self.run_dir = self.folder / f"run_{self.num_runs}"
        self.output = (self.folder / f"output_{self.num_runs}").open("w+")
        options = (f"--nproc-per-node={num_ranks}", f"--max-restarts={restarts}")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "echelon", "run", *options, "--stall-timeout=600",
             f"--run-dir={self.run_dir}", *map(str, script or (SCRIPT,)), *self.model, *self.files],
            stdout=self.output, stderr=subprocess.STDOUT, env=kept,
        )  # fmt: skip

    def lines(self) -> list[dict]:
        if not self.log.exists():
            return []
        whole = self.log.read_text().rpartition("\n")[0]
        (self.folder / "seen").write_text(whole)
        return [line for line in read_log(self.folder / "seen") if "loss" in line]

    def wait_for_step(self, step: int) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not (lines := self.lines()) or lines[-1]["step"] < step:
            assert self.process.poll() is None, self.told()
            assert time.monotonic() < deadline, self.told()
            time.sleep(0.01)

    def pid_of(self, rank: int, attempt: int) -> int:
        """Wait for a rank's process of the job's n-th start, and return its number."""
        mark = f"ECHELON_RANK_DIR={self.run_dir}/rank_{rank}/attempt_{attempt}\0".encode()
        deadline = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline:
            for folder in Path("/proc").glob("[0-9]*"):
                with contextlib.suppress(OSError):
                    is_ours = mark in (folder / "environ").read_bytes()
                    if is_ours and b"train_gpt" in (folder / "cmdline").read_bytes():
                        return int(folder.name)
            assert self.process.poll() is None, self.told()
            time.sleep(0.05)
        raise AssertionError(f"rank {rank} is not there: {self.told()}")

    def kill(self, rank: int, attempt: int, *, num_steps: int) -> int:
        """Kill a rank of the n-th start once it is so many steps further than ever before."""
        pid = self.pid_of(rank, attempt)  # the start before has ended, so the log stands still
        steps = [line["step"] for line in self.lines()]
        self.wait_for_step(max(steps, default=0) + num_steps)
        os.kill(pid, signal.SIGKILL)
        return self.lines()[-1]["step"]

    def end(self) -> int:
        return self.process.wait(LIMIT_S)

    def told(self) -> str:
        self.output.flush()
        return Path(self.output.name).read_text()[-6000:]

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self.output.close()


@pytest.fixture
def make_job(tmp_path):
    made = []

    def make(**options) -> Job:
        made.append(Job(tmp_path, **options))
        return made[-1]

    yield make
    for job in made:
        job.close()


def expect_whole_stream(job: Job, num_steps: int) -> None:
    """Check that the log is one of each step, with the samples that belong to it."""
    lines = job.lines()
    assert [line["step"] for line in lines] == list(range(1, num_steps + 1)), job.told()
    assert [line["first_sample"] for line in lines] == [BATCH * n for n in range(num_steps)]
    assert {line["num_samples"] for line in lines} == {BATCH}


def undisturbed(job: Job) -> list[float]:
    """Return the losses of a run of one process that nothing happens to."""
    settings = read_settings(build_parser("x"), job.model)
    prepared = prepare(settings)
    world = dist.init()
    trainer = Trainer.build(prepared.config, prepared.training, prepared.corpus, world=world)
    losses = [trainer.train_step() for _ in range(settings.training.steps)]
    trainer.source.close()
    dist.shutdown()
    return losses


def test_a_killed_run_goes_on_from_its_newest_checkpoint(make_job):
    job = make_job(num_steps=12, every=4)
    job.start(2, Path(__file__).with_name("killed_train.py"), "1", "9", restarts=1)
    assert job.end() == 0, job.told()
    # a save waits for the one before, so that of step 4 is complete; that of step 8 may be
    assert re.search(r"resumed .* after step [48]\b", job.told()), job.told()
    expect_whole_stream(job, 12)
    assert [line["loss"] for line in job.lines()] == pytest.approx(undisturbed(job), abs=1e-4)


@pytest.mark.slow
def test_twenty_random_kills_on_four_ranks_and_then_three(make_job):
    """Ten on four ranks, which SIGTERM then ends; three go on where they stopped."""
    draw = random.Random(os.environ.get("SEED", "19"))
    num_steps, killed = 300, []
    job = make_job(num_steps=num_steps, every=3)
    job.start(4, restarts=10)
    for attempt in range(10):
        killed.append(job.kill(draw.randrange(4), attempt, num_steps=draw.randint(1, 5)))
    job.pid_of(0, 10)
    job.wait_for_step(killed[-1] + 2)
    job.process.send_signal(signal.SIGTERM)
    assert job.end() != 0, job.told()
    assert "stopped after step" in job.told(), job.told()
    job.output.close()
    job.start(3, restarts=10)
    for attempt in range(10):
        killed.append(job.kill(draw.randrange(3), attempt, num_steps=draw.randint(1, 5)))
    assert job.end() == 0, job.told()
    expect_whole_stream(job, num_steps)
    losses, expected = [line["loss"] for line in job.lines()], undisturbed(job)
    difference = max(abs(a - b) for a, b in zip(losses, expected, strict=True))
    print(f"killed at steps {killed}: largest difference of the loss {difference:.2e}")
    assert difference < 1e-3
