"""Defaults from Slurm's, Kubernetes' and MPI's environment."""

from __future__ import annotations

import pytest

from echelon.launcher.options.options import parse
from echelon.launcher.options.scheduler import defaults, first_host, misuse

_SLURM = {
    "SLURM_JOB_ID": "123456",
    "SLURM_PROCID": "2",
    "SLURM_NODEID": "2",
    "SLURM_NNODES": "4",
    "SLURM_NTASKS": "4",
    "SLURM_JOB_NODELIST": "gpu[003-005,012]",
    "SLURM_GPUS_ON_NODE": "8",
}


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [
        ("gpu[003-007,12],big1", "gpu003"),
        ("gpu1", "gpu1"),
        ("a,b", "a"),
        ("rack1-n[07,09]-ib", "rack1-n07-ib"),
        ("rack[0-63]_blade[3-41],x", "rack0_blade3"),
    ],
)
def test_first_host_of_a_node_list(nodelist, host):
    assert first_host(nodelist) == host


def test_slurm_tells_nodes_place_endpoint_and_name():
    assert defaults(_SLURM) == {
        "nnodes": "4",
        "rdzv_id": "123456",
        "node_rank": "2",
        "rdzv_endpoint": "gpu003:23456",
        "nproc_per_node": "8",
    }


def test_slurm_with_a_task_a_rank_is_one_clear_line(capsys):
    environ = {
        **_SLURM,
        "SLURM_STEP_NUM_TASKS": "32",
        "SLURM_STEP_NUM_NODES": "4",
        "SLURM_STEP_TASKS_PER_NODE": "8(x4)",
        "ECHELON_SECRET": "x" * 16,
    }
    with pytest.raises(SystemExit) as exit_info:
        parse(["--no-python", "true"], environ)
    assert exit_info.value.code == 2
    text = capsys.readouterr().err
    assert "srun --ntasks-per-node=1" in text
    assert text.count("\n") == 1


def test_a_batch_script_of_many_tasks_is_no_step_of_many_launchers():
    environ = {**_SLURM, "SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_NNODES": "1"}
    assert parse(["--no-python", "true"], environ).rendezvous is None
    step = {**environ, "SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_NUM_NODES": "1"}
    step |= {"SLURM_STEP_TASKS_PER_NODE": "8", "SLURM_NNODES": "4"}
    assert parse(["--standalone", "--no-python", "true"], step).rendezvous is None


def test_one_slurm_node_needs_no_endpoint_and_no_secret():
    environ = {**_SLURM, "SLURM_NNODES": "1", "SLURM_NTASKS": "1"}
    options = parse(["--no-python", "true"], environ)
    assert (options.rendezvous, options.nproc_per_node, options.rdzv_id) == (None, 8, "123456")


def test_an_option_and_pet_win_over_the_scheduler():
    environ = {**_SLURM, "PET_NNODES": "1"}
    assert parse(["--nproc-per-node", "2", "--no-python", "true"], environ).nproc_per_node == 2
    assert parse(["--no-python", "true"], environ).max_nodes == 1


def test_an_indexed_job_of_kubernetes_knows_its_place():
    environ = {
        "JOB_COMPLETION_INDEX": "3",
        "PET_NNODES": "4",
        "ECHELON_SECRET": "a-secret-of-the-tests",
    }
    options = parse(["--rdzv-endpoint", "127.0.0.1:1", "--no-python", "true"], environ)
    assert (options.node_rank, options.rendezvous.is_host) == (3, False)


def test_mpi_tells_nodes_and_place():
    environ = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"}
    assert defaults(environ) == {"nnodes": "2", "node_rank": "1"}
    assert misuse(environ) == ""
    assert "ppr:1:node" in misuse({**environ, "OMPI_COMM_WORLD_LOCAL_SIZE": "8"})
