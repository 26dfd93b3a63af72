"""A run directory that several nodes share: nothing is lost, and nobody fails, whoever writes."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest

from echelon.launcher.job.rundir import RunDirectory, write_json
from tests.support.ranks import read_json

_WRITERS, _ROUNDS = 4, 40


def _write(path: Path, writer: int, gate) -> None:
    directory = RunDirectory(path, "", node=f"node-{writer}")
    gate.wait()
    for round_ in range(_ROUNDS):
        directory.write_job({"rendezvous": "a:1", "secret": f"{writer}-{round_}"})
        number, folder = directory.open_incident()
        write_json(folder / "incident.json", {"writer": writer, "round": round_, "number": number})
        final = directory.complete_incident(number, folder)
        assert read_json(final / "incident.json")["writer"] == writer
        read_json(directory.job_file)
        read_json(path / "dump/latest/incident.json")


def test_many_writers_lose_nothing(tmp_path):
    context = multiprocessing.get_context("fork")
    gate = context.Barrier(_WRITERS)
    writers = [context.Process(target=_write, args=(tmp_path, i, gate)) for i in range(_WRITERS)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(600)
    assert [writer.exitcode for writer in writers] == [0] * _WRITERS
    found = [read_json(path) for path in tmp_path.glob("dump/incident_*/incident.json")]
    expected = {(w, r) for w in range(_WRITERS) for r in range(_ROUNDS)}
    assert {(one["writer"], one["round"]) for one in found} == expected
    assert not list(tmp_path.rglob("*.part*"))


def test_only_the_host_writes_job_json(tmp_path):
    host, other = RunDirectory(tmp_path, ""), RunDirectory(tmp_path, "", node="b")
    host.write_job({"endpoint": "a:5", "rendezvous": "a:1", "secret": "x"})
    other.write_job({"rendezvous": "a:1", "secret": "x"})
    assert read_json(tmp_path / "job.json")["endpoint"] == "a:5"
    assert other.job_file != host.job_file
    assert other.job_file.stat().st_mode & 0o777 == 0o600


_FAILING = """
import os, signal, sys
if os.environ["RANK"] == "5":
    sys.exit(9)
signal.pause()
"""


@pytest.mark.ranks
@pytest.mark.parametrize(
    "num_starts", [1, pytest.param(100, marks=pytest.mark.slow)], ids=["1", "100"]
)
def test_nodes_that_share_a_folder_start_and_fail_together(cluster, tmp_path, num_starts):
    job = cluster(_FAILING)
    job.run_dir = tmp_path / "shared"
    for start in range(num_starts):
        nodes = [job.start("--nnodes", "4", rank=rank) for rank in range(4)]
        assert [node.end() for node in nodes] == [9] * 4, job.told()
        assert not any("Traceback" in line for node in nodes for line in node.lines)
        incident = tmp_path / f"shared/dump/incident_{start}"
        names = {path.name for path in incident.glob("rank_*")}
        assert names == {f"rank_{rank}" for rank in range(8)}
        assert read_json(incident / "verdict.json")["verdict"]["culprit_ranks"] == [5]
        assert (tmp_path / "shared/dump/latest").readlink() == Path(incident.name)
        job.close()
        job.nodes.clear()
