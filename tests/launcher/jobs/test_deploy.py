"""Every example of docs/deploy.md is run; the environment stands in for the schedulers."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from tests.examples.runs import SMALL_MODEL
from tests.launcher.cluster import Cluster
from tests.support.machine import needs_machine
from tests.support.ports import free_port
from tests.support.ranks import read_json

pytestmark = pytest.mark.ranks

_PAGE = (Path(__file__).parents[3] / "docs/deploy.md").read_text()
_LIMIT_S = 600
_WORKER = """
import os, sys
print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], sys.argv[1:], flush=True)
"""
_FIRST_PORT, _NUM_PORTS = 20000, 20000  # of the endpoints that are made from Slurm's job numbers

# Stand-ins for what starts a command on other hosts: they do it here, once a node.
_SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do shift; done
for node in 0 1; do SLURM_NODEID=$node SLURM_PROCID=$node "$@" & nodes+=($!); done
code=0
for pid in "${nodes[@]}"; do wait "$pid" || code=$?; done
exit $code
"""
_MPIRUN = """#!/bin/bash
[[ "$1 $2 $3 $4" == "--hostfile hosts --map-by ppr:1:node" ]] || exit 99
shift 4
export OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_SIZE=1
for rank in 0 1; do OMPI_COMM_WORLD_RANK=$rank "$@" & nodes+=($!); done
code=0
for pid in "${nodes[@]}"; do wait "$pid" || code=$?; done
exit $code
"""
_SSH = """#!/bin/bash
[[ "$1" == -tt && "$2" == localhost ]] || exit 99
shift 2
cp train.py .echelon-secret "$HOME" 2>/dev/null
cd "$HOME" && exec sh -c "$*"
"""
_SCP = """#!/bin/bash
[[ "$1" == -pq && "$2" == "$HOME/.echelon-secret" && "$3" == localhost: ]]
"""


def _blocks(section: str, language: str) -> list[str]:
    text = re.search(rf"^## {section}\n(.*?)(?=^## |\Z)", _PAGE, re.DOTALL | re.MULTILINE)
    assert text is not None, section
    return re.findall(rf"```{language}\n(.*?)```", text[1], re.DOTALL)


class _Place:
    """A home with the worker, and programs that stand in for the cluster's."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.programs = folder / "bin"
        self.programs.mkdir()
        (folder / "train.py").write_text(_WORKER)
        self.add("echelon", f'#!/bin/sh\nexec "{sys.executable}" -m echelon "$@"\n')

    def add(self, name: str, text: str) -> None:
        path = self.programs / name
        path.write_text(text)
        path.chmod(0o755)

    def run(self, argv: Sequence[str], **environ: str) -> subprocess.CompletedProcess[str]:
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("PET_", "SLURM_", "OMPI_", "PMI_", "ECHELON_"))
        }
        return subprocess.run(
            argv,
            capture_output=True, text=True, check=False, timeout=_LIMIT_S, cwd=self.folder,
            stdin=subprocess.DEVNULL,
            env={
                **kept, "HOME": str(self.folder), "PATH": f"{self.programs}:{os.environ['PATH']}",
                "PYTHONPATH": str(Path(__file__).parents[3]), **environ,
            },
        )  # fmt: skip


@pytest.fixture
def place(tmp_path):
    return _Place(tmp_path)


def _ranks_seen(out: str) -> list[str]:
    return sorted(line.partition("| ")[2] for line in out.splitlines() if "| rank " in line)


def _all_of(world_size: int) -> list[str]:
    return [f"rank {rank} of {world_size} ['--lr', '3e-4']" for rank in range(world_size)]


def test_the_batch_script_of_slurm(place):
    (script,) = _blocks("Slurm", "bash")
    port = free_port()
    while not _FIRST_PORT <= port < _FIRST_PORT + _NUM_PORTS:
        port = free_port()
    place.add("srun", _SRUN)
    (place.folder / "train.sbatch").write_text(script)
    job = str(port - _FIRST_PORT + 3 * _NUM_PORTS)
    done = place.run(
        ["bash", "-e", "train.sbatch"],
        SLURM_JOB_ID=job, SLURM_NNODES="2", SLURM_NTASKS="2", SLURM_GPUS_ON_NODE="2",
        SLURM_JOB_NODELIST="localhost,node-b",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert _ranks_seen(done.stdout) == _all_of(4)
    run_dir = place.folder / "runs" / job  # on a file system that both nodes share
    report = read_json(run_dir / "report.json")
    assert (report["job_id"], report["world_size"]) == (job, 4)
    assert "endpoint" in read_json(run_dir / "job.json"), "the other node leaves the host's alone"
    assert {path.name for path in run_dir.glob("rank_*")} == {f"rank_{r}" for r in range(4)}


def test_a_launcher_for_each_rank_is_one_line(place):
    done = place.run(
        ["echelon", "run", "train.py"],
        SLURM_JOB_ID="1", SLURM_PROCID="3", SLURM_NNODES="2", SLURM_NTASKS="16",
        SLURM_LOCALID="3", SLURM_STEP_NUM_TASKS="16", SLURM_STEP_NUM_NODES="2",
        SLURM_JOB_NODELIST="localhost,b", ECHELON_SECRET="a-secret-of-the-tests",
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1


def test_the_pods_of_kubernetes(tmp_path, place):
    (manifest,) = _blocks("Kubernetes", "yaml")
    environ = dict(re.findall(r'\{name: (\w+), value: "([^"]*)"\}', manifest))
    words = [re.findall(r'"([^"]*)"', re.search(rf"{key}: \[(.*)\]", manifest)[1])
             for key in ("command", "args")]  # fmt: skip
    assert words[0][:2] == ["echelon", "run"]
    assert "- name: ECHELON_SECRET" in manifest
    host, port = environ["PET_RDZV_ENDPOINT"].split(":")
    assert (host, int(port)) == ("train-0.train", 29400)
    assert re.search(r"completions: (\d+)", manifest)[1] == environ["PET_NNODES"] == "2"
    environ |= {
        "PET_NPROC_PER_NODE": "2",
        "PET_RDZV_ENDPOINT": f"localhost:{free_port()}",
        "ECHELON_SECRET": "from-the-cluster-itself",
    }
    pods = [_pod(place, words, environ, index) for index in range(2)]
    outs = [pod.communicate(timeout=_LIMIT_S) for pod in pods]
    assert [pod.returncode for pod in pods] == [0, 0], outs
    assert _ranks_seen("".join(out for out, _ in outs)) == _all_of(4)


def test_a_kubernetes_job_survives_the_loss_of_its_host_several_times():
    """`backoffLimit` counts pods: one lost host fails all of them."""
    (manifest,) = _blocks("Kubernetes", "yaml")
    pods = int(re.search(r"completions: (\d+)", manifest)[1])
    restarts = int(re.search(r'"--max-restarts", "(\d+)"', manifest)[1])
    assert int(re.search(r"backoffLimit: (\d+)", manifest)[1]) >= pods * (restarts + 1)
    assert "--from-literal" not in _PAGE, "a secret on a command line"


def _pod(
    place: _Place, words: list[list[str]], environ: Mapping[str, str], index: int
) -> subprocess.Popen[str]:
    data = place.folder / f"pod_{index}"
    data.mkdir()
    argv = [word.replace("/data", str(data)) for words_of in words for word in words_of]
    return subprocess.Popen(
        argv,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=place.folder,
        stdin=subprocess.DEVNULL,
        env={
            **os.environ, **environ, "JOB_COMPLETION_INDEX": str(index),
            "PATH": f"{place.programs}:{os.environ['PATH']}",
        },
    )  # fmt: skip


@pytest.mark.netns
@needs_machine
def test_the_first_pods_name_may_come_to_life_after_the_pods(tmp_path):
    names = tmp_path / "hosts"
    names.write_text("127.0.0.1 localhost\n")
    with_names = (
        "unshare",
        "-m",
        "sh",
        "-c",
        f'mount --bind {names} /etc/hosts && exec "$@"',
        "sh",
    )
    job = Cluster(tmp_path, _WORKER, endpoint=f"train-0.train:{free_port()}")
    try:
        pods = [job.start("--nnodes", "2", rank=r, before=with_names) for r in (1, 0)]
        pods[0].wait_for("joining train-0.train")
        pods[1].wait_for("2 ranks on each of 2 nodes")
        with names.open("a") as file:
            file.write("127.0.0.1 train-0.train\n")
        assert [pod.end() for pod in pods] == [0, 0], job.told()
    finally:
        job.close()
    assert job.left() == []


def _made_local(script: str) -> str:
    return (
        script.replace("node-a node-b", "localhost localhost")
        .replace("node-a", "localhost")
        .replace("29400", str(free_port()))
        .replace("--nproc-per-node 8", "--nproc-per-node 2")
    )


@pytest.mark.parametrize(
    ("section", "programs"),
    [("mpirun", {"mpirun": _MPIRUN}), ("Plain hosts", {"ssh": _SSH, "scp": _SCP})],
)
def test_the_script_for_other_hosts(place, section, programs):
    (script,) = _blocks(section, "bash")
    for name, text in programs.items():
        place.add(name, text)
    done = place.run(["bash", "-c", _made_local(script)])
    assert done.returncode == 0, done.stderr
    assert _ranks_seen(done.stdout) == _all_of(4)
    secret = place.folder / ".echelon-secret"
    assert secret.stat().st_mode & 0o777 == 0o600
    assert secret.read_text().strip() not in script


def test_the_recipe_for_two_shells(tmp_path):
    pytest.importorskip("torch")
    recipe = Path(__file__).parents[3] / "examples/two_nodes.sh"
    text = tmp_path / "text"
    text.write_bytes(b"".join(b"def f_%d(x):\n    return x + %d\n" % (n, n) for n in range(4000)))
    environ = {
        **os.environ, "ENDPOINT": f"127.0.0.1:{free_port()}", "RUNS": str(tmp_path),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }  # fmt: skip
    environ.pop("ECHELON_SECRET", None)
    shells = [
        subprocess.Popen(
            [recipe, place, *SMALL_MODEL, "--steps=3", "--data", str(text)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ,
            stdin=subprocess.DEVNULL,
        )
        for place in ("0", "1")
    ]  # fmt: skip
    outs = [shell.communicate(timeout=_LIMIT_S) for shell in shells]
    assert [shell.returncode for shell in shells] == [0, 0], outs
    assert "world: 4 ranks" in outs[0][0]
    assert (tmp_path / "two-nodes.secret").stat().st_mode & 0o777 == 0o600
