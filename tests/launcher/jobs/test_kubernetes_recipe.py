"""The recipe for Kubernetes: pods are lost, evicted and made again, and the training goes on.

Pods are processes with the manifest's command and environment; a controller does what an Indexed
Job does with pods that end.
"""

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

from tests.examples.runs import EXAMPLES, INHERITED, SMALL_MODEL, launch
from tests.launcher.cluster import left, marked
from tests.support.ports import free_port

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

_MANIFEST = (EXAMPLES / "kubernetes/train.yaml").read_text()
_STEPS, _EVERY = 240, 10
_LIMIT_S = 600
_BAD_USAGE = 2  # the manifest's FailJob


class _Controller:
    """Keeps one pod per index running until it succeeds, as an Indexed Job does."""

    def __init__(self, folder: Path, options: tuple[str, ...]) -> None:
        self.folder, self.options = folder, options
        self.environ = dict(re.findall(r'\{name: (\w+), value: "([^"]*)"\}', _MANIFEST))
        self.environ |= {
            "PET_NPROC_PER_NODE": "1",
            "PET_RDZV_ENDPOINT": f"localhost:{free_port()}",
            "ECHELON_SECRET": "from-the-cluster-itself",
            "PYTHONPATH": str(EXAMPLES.parent),
            "OMP_NUM_THREADS": "1",
        }
        self.mark = f"ECHELON_TEST_MARK={os.getpid()}-{folder.name}"
        self.pods: dict[int, subprocess.Popen[bytes]] = {}
        self.codes: dict[int, list[int]] = {}
        self.succeeded: set[int] = set()
        (folder / "data").mkdir()
        for index in range(int(self.environ["PET_NNODES"])):
            self.codes[index] = []
            self._start(index)

    def _start(self, index: int) -> None:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(INHERITED)}
        name, _, value = self.mark.partition("=")
        with self._log(index).open("ab") as log:
            self.pods[index] = subprocess.Popen(
                [sys.executable, "-m", *self._words("command"), *self._words("args"),
                 *self.options],
                stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                cwd=EXAMPLES,
                env={
                    **kept, **self.environ, "JOB_COMPLETION_INDEX": str(index),
                    name: f"{value}-{index}-",
                },
            )  # fmt: skip

    def _words(self, key: str) -> list[str]:
        words = re.findall(r'"([^"]*)"', re.search(rf"{key}: \[(.*)\]", _MANIFEST)[1])
        return [word.replace("/data", str(self.folder / "data")) for word in words]

    def _log(self, index: int) -> Path:
        return self.folder / f"pod_{index}.log"

    def reconcile(self) -> None:
        """Make pods that failed again; what succeeded stays ended."""
        for index, pod in self.pods.items():
            if index in self.succeeded or pod.poll() is None:
                continue
            assert pod.returncode != _BAD_USAGE, self.told()
            self.codes[index].append(pod.returncode)
            if pod.returncode == 0:
                self.succeeded.add(index)
            else:
                self._kill_all(index)  # a container ends with all of its processes
                self._start(index)

    def wait_for(self, is_true) -> None:
        deadline_s = time.monotonic() + _LIMIT_S
        while not is_true():
            assert time.monotonic() < deadline_s, self.told()
            self.reconcile()
            time.sleep(0.02)

    def lose(self, index: int) -> None:
        """End a pod with all of its processes, as the loss of its node does."""
        self._kill_all(index)
        self.pods[index].wait(_LIMIT_S)

    def evict(self, index: int) -> None:
        """Send what the kubelet sends; after the manifest's grace period it would kill."""
        self.pods[index].send_signal(signal.SIGTERM)

    def _kill_all(self, index: int) -> None:
        while pids := marked(f"{self.mark}-{index}-"):
            for pid in pids:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            self.pods[index].poll()  # a dead child is there until its parent has asked

    def told(self) -> str:
        return "\n".join(
            f"--- pod {index}, ended with {self.codes[index]}\n{self._log(index).read_text()}"
            for index in self.pods
        )

    def close(self) -> None:
        for index in self.pods:
            self._kill_all(index)
            self.pods[index].wait(_LIMIT_S)
        assert left(self.mark) == []


def _lines(log: Path) -> list[dict]:
    if not log.exists():
        return []
    whole = log.read_text().rpartition("\n")[0].splitlines()
    return [line for line in map(json.loads, whole) if "loss" in line]


def test_pods_that_are_lost_or_evicted_are_made_again_and_train_on(tmp_path):
    text, log = tmp_path / "text", tmp_path / "data" / "log"
    text.write_bytes(b"".join(b"def f_%d(x):\n    return x + %d\n" % (n, n) for n in range(4000)))
    model = (*SMALL_MODEL, f"--steps={_STEPS}", f"--data={text}")
    job = _Controller(tmp_path, (*model, f"--log={log}", f"--checkpoint-every={_EVERY}"))

    def is_further(step):
        return lambda: (_lines(log) or [{"step": 0}])[-1]["step"] >= step

    def resumed():
        return re.findall(r"resumed .* after step (\d+)", job.told())

    try:
        job.wait_for(is_further(25))
        job.lose(1)
        job.wait_for(lambda: len(resumed()) == 1)
        assert job.codes[0] == [], "pod 0 waits for the new pod 1"
        job.wait_for(is_further(75))
        job.evict(1)
        job.wait_for(lambda: len(resumed()) == 2)
        saved = re.findall(r"stopped after step (\d+)", job.told())
        assert len(saved) == 1, job.told()
        assert resumed()[1] == saved[0], "nothing is trained again after an eviction"
        job.wait_for(is_further(150))
        job.lose(0)  # it hosted the job
        job.wait_for(lambda: job.succeeded == {0, 1})
    finally:
        job.close()
    assert len(resumed()) == 3, job.told()
    lines = _lines(log)
    assert [line["step"] for line in lines] == list(range(1, _STEPS + 1))
    assert [line["first_sample"] for line in lines] == [8 * step for step in range(_STEPS)]
    alone = tmp_path / "alone"
    ended = launch(
        1, tmp_path / "run", "train_gpt.py", *model, f"--log={alone}", stall_timeout_s=60
    )
    assert ended.code == 0, ended.explain()
    expected = [line["loss"] for line in _lines(alone)]
    assert [line["loss"] for line in lines] == pytest.approx(expected, abs=1e-3)
