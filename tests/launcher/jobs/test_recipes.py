"""The recipes in examples/: what they do when the time is up, and when the program fails."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.examples.runs import SMALL_MODEL
from tests.support.ports import free_port

pytestmark = pytest.mark.ranks

_ROOT = Path(__file__).parents[3]
_SBATCH = _ROOT / "examples/slurm/train.sbatch"
_MANIFEST = (_ROOT / "examples/kubernetes/train.yaml").read_text()
_FIRST_PORT, _NUM_PORTS = 20000, 20000  # of the endpoints that are made from Slurm's job numbers
_LIMIT_S = 600

_SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do shift; done
SLURM_NODEID=0 SLURM_PROCID=0 "$@" &
node=$!
trap 'kill -TERM $node' TERM
code=0
wait $node || code=$?
while kill -0 $node 2> /dev/null; do code=0; wait $node || code=$?; done
exit $code
"""
_TRAIN = """
import signal, sys, time
def save(*_):
    print("saved", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
print("training", flush=True)
if sys.argv[1] == "fails":
    sys.exit(7)
while True:
    signal.pause()
"""


def _job_id() -> str:
    """Return a job's number whose endpoint is a free port."""
    port = free_port()
    while not _FIRST_PORT <= port < _FIRST_PORT + _NUM_PORTS:
        port = free_port()
    return str(port - _FIRST_PORT + 3 * _NUM_PORTS)


def _batch(
    folder: Path, how: str, *, srun: str = _SRUN, nodes: int = 1, **environ: str
) -> subprocess.Popen[str]:
    programs = folder / "bin"
    programs.mkdir(exist_ok=True)  # a job that is queued again has them
    for name, text in (
        ("echelon", f'#!/bin/sh\nexec "{sys.executable}" -m echelon "$@"\n'),
        ("srun", srun),
        ("scontrol", '#!/bin/sh\necho "scontrol $*"\n'),
    ):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    (folder / "train.py").write_text(_TRAIN)
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PET_", "SLURM_", "ECHELON_"))
    }
    return subprocess.Popen(
        ["bash", str(_SBATCH)],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
        text=True, cwd=folder, start_new_session=True,
        env={
            **kept, "PATH": f"{programs}:{os.environ['PATH']}", "PYTHONPATH": str(_ROOT),
            "SLURM_JOB_ID": _job_id(), "SLURM_NNODES": str(nodes),
            "SLURM_NTASKS": str(nodes), "SLURM_GPUS_ON_NODE": "1",
            "SLURM_JOB_NODELIST": "localhost" + ",node-b" * (nodes - 1),
            "TRAIN": f"train.py {how}", **environ,
        },
    )  # fmt: skip


def _read_until(batch: subprocess.Popen[str], wanted: str) -> str:
    assert batch.stdout is not None
    lines = []
    for line in batch.stdout:
        lines.append(line)
        if wanted in line:
            return "".join(lines)
    raise AssertionError(f"no {wanted!r} in: {''.join(lines)}")


@pytest.fixture
def batch_of(tmp_path):
    """Start the batch script; nothing of it runs on after the test."""
    made = []

    def start(how):
        made.append(_batch(tmp_path, how))
        return made[-1]

    yield start
    for batch in made:
        if batch.poll() is None:
            os.killpg(batch.pid, signal.SIGKILL)
        batch.communicate(timeout=_LIMIT_S)


def test_before_the_time_is_up_the_ranks_save_and_the_job_is_queued_again(batch_of):
    batch = batch_of("trains")
    _read_until(batch, "training")
    batch.send_signal(signal.SIGUSR1)
    out, _ = batch.communicate(timeout=_LIMIT_S)
    assert batch.returncode == 0, out
    assert "the time is nearly up: the ranks save within 90 s" in out
    assert "saved" in out
    assert re.search(r"^scontrol requeue \d+$", out, re.MULTILINE), out


def test_a_program_that_fails_is_not_queued_again(batch_of):
    batch = batch_of("fails")
    out, _ = batch.communicate(timeout=_LIMIT_S)
    assert batch.returncode not in (0, 2), out
    assert "scontrol" not in out


def test_the_pods_have_time_to_save_and_continue_from_their_checkpoint():
    (grace_s,) = re.findall(r"terminationGracePeriodSeconds: (\d+)", _MANIFEST)
    (shutdown_s,) = re.findall(r'"--shutdown-timeout", "(\d+)"', _MANIFEST)
    assert int(grace_s) > int(shutdown_s)
    assert '"--resume", "auto"' in _MANIFEST
    (pods,) = re.findall(r"completions: (\d+)", _MANIFEST)
    (restarts,) = re.findall(r'"--max-restarts", "(\d+)"', _MANIFEST)
    (limit,) = re.findall(r"backoffLimit: (\d+)", _MANIFEST)
    assert int(limit) >= int(pods) * (int(restarts) + 1)
    assert re.findall(r'PET_NNODES, value: "(\d+)"', _MANIFEST) == [pods]
    assert "from-literal" not in _MANIFEST, "a secret on a command line"


_SRUN_OF_TWO = """#!/bin/bash
while [[ $1 == --* ]]; do shift; done
for node in 0 1; do
    SLURM_NODEID=$node SLURM_PROCID=$node "$@" &
    nodes+=($!)
    echo $! > node_$node
done
code=0
wait "${nodes[0]}" || code=$?
wait "${nodes[1]}"
exit $code
"""


def _steps(log: Path) -> list[int]:
    if not log.exists():
        return []
    whole = log.read_text().rpartition("\n")[0].splitlines()
    return [step["step"] for step in map(json.loads, whole) if "loss" in step]


class _Job:
    """A training of two launchers, which stand for two nodes, under the batch script."""

    def __init__(self, folder: Path, num_steps: int) -> None:
        self.folder, self.num_steps, self.log = folder, num_steps, folder / "log"
        self.job_id = _job_id()
        text = folder / "text"
        text.write_bytes(
            b"".join(b"def f_%d(x):\n    return x + %d\n" % (n, n) for n in range(4000))
        )
        train = [str(_ROOT / "examples/train_gpt.py"), *SMALL_MODEL, f"--steps={num_steps}"]
        train += [f"--data={text}", f"--log={self.log}", f"--checkpoint={folder}/gpt"]
        self.train = " ".join([*train, "--checkpoint-every=5", "--resume=auto"])

    def run(self, **environ: str) -> subprocess.Popen[str]:
        return _batch(
            self.folder,
            "",
            srun=_SRUN_OF_TWO,
            nodes=2,
            TRAIN=self.train,
            SLURM_JOB_ID=self.job_id,
            **environ,
        )

    def lose(self, batch: subprocess.Popen[str], node: int, *, after_step: int) -> None:
        """Kill a launcher in training, and with it its rank."""
        deadline_s = time.monotonic() + _LIMIT_S
        while (_steps(self.log) or [0])[-1] < after_step:
            assert batch.poll() is None, batch.communicate()[0]
            assert time.monotonic() < deadline_s, f"too slow: no step {after_step}"
            time.sleep(0.05)
        os.kill(int((self.folder / f"node_{node}").read_text()), signal.SIGKILL)

    def end(self, batch: subprocess.Popen[str]) -> str:
        """Wait for the end; return what was printed. Nothing runs on after it."""
        try:
            return batch.communicate(timeout=_LIMIT_S)[0]
        finally:
            if batch.poll() is None:
                os.killpg(batch.pid, signal.SIGKILL)
                batch.communicate()

    def expect_every_step_once(self) -> None:
        assert _steps(self.log) == list(range(1, self.num_steps + 1))


@pytest.mark.slow
def test_a_job_that_loses_a_node_goes_on_without_it_from_its_newest_checkpoint(tmp_path):
    job = _Job(tmp_path, num_steps=60)
    batch = job.run()
    try:
        job.lose(batch, 1, after_step=12)
    finally:
        out = job.end(batch)
    assert batch.returncode == 0, out
    resumed = re.findall(r"resumed .* after step (\d+)", out)
    assert len(resumed) == 1, out
    assert int(resumed[0]) in (5, 10, 15, 20), out
    assert "world: 1 ranks" in out, out
    job.expect_every_step_once()


@pytest.mark.slow
def test_a_job_that_loses_the_node_that_hosts_it_is_queued_again_and_goes_on(tmp_path):
    job = _Job(tmp_path, num_steps=60)
    batch = job.run()
    try:
        job.lose(batch, 0, after_step=12)
    finally:
        out = job.end(batch)
    assert batch.returncode == 0, out
    assert re.search(r"^scontrol requeue \d+$", out, re.MULTILINE), out
    assert "resumed" not in out, out
    out = job.end(again := job.run(SLURM_RESTART_COUNT="1"))
    assert again.returncode == 0, out
    assert len(re.findall(r"resumed .* after step (5|10|15|20)\n", out)) == 1, out
    assert "world: 2 ranks" in out, out
    job.expect_every_step_once()
