"""What a cluster's scheduler says in the environment, as defaults for `echelon run`.

Slurm      `srun --ntasks-per-node=1 echelon run train.py`: nodes, this node's place, the endpoint
           (first node of the job, a port made from the job's number) and the job's name
Kubernetes an Indexed Job's JOB_COMPLETION_INDEX is this node's place; `PET_*`, which the training
           operators set, are the launcher's own variables anyway
MPI        `mpirun --map-by ppr:1:node echelon run ...`: nodes and this node's place

Options and `PET_*` variables win over all of this. One launcher a node is needed: a scheduler that
starts one per rank is told so in one line.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

_FIRST_PORT = 20000
_NUM_PORTS = 20000


def defaults(environ: Mapping[str, str]) -> dict[str, str]:
    """Return values by option name (`nnodes`, `node_rank`, ...), {} where no scheduler is seen.

    Raises:
        ValueError: the scheduler started several launchers on this node.
    """
    if "SLURM_JOB_ID" in environ and "SLURM_PROCID" in environ:
        return _slurm(environ)
    if "OMPI_COMM_WORLD_SIZE" in environ:
        return _mpi(environ, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "Open MPI")
    if "PMI_RANK" in environ and "PMI_SIZE" in environ:
        return _mpi(environ, "PMI_RANK", "PMI_SIZE", "mpirun")
    if "JOB_COMPLETION_INDEX" in environ:
        return {"node_rank": environ["JOB_COMPLETION_INDEX"]}
    return {}


def first_host(nodelist: str) -> str:
    """Return the first host of Slurm's compressed list: `gpu[003-007,12],big1` -> `gpu003`."""
    match = re.match(r"([^\[,]*)(?:\[([^\]]*)\])?([^,\[]*)", nodelist)
    assert match is not None
    prefix, inside, suffix = match.groups()
    if inside is None:
        return prefix
    return prefix + re.split(r"[,-]", inside)[0] + suffix


def _slurm(environ: Mapping[str, str]) -> dict[str, str]:
    num_nodes = environ.get("SLURM_NNODES", environ.get("SLURM_JOB_NUM_NODES", "1"))
    if environ.get("SLURM_NTASKS", num_nodes) != num_nodes:
        raise ValueError(
            f"Slurm started {environ['SLURM_NTASKS']} launchers on {num_nodes} nodes; one a node "
            "is needed: srun --ntasks-per-node=1 echelon run ..."
        )
    found = {"nnodes": num_nodes, "rdzv_id": environ["SLURM_JOB_ID"]}
    if num_nodes != "1":
        found["node_rank"] = environ.get("SLURM_NODEID", environ["SLURM_PROCID"])
        nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", "")
        digits = re.sub(r"\D", "", environ["SLURM_JOB_ID"]) or "0"
        port = _FIRST_PORT + int(digits) % _NUM_PORTS
        if nodes:
            found["rdzv_endpoint"] = f"{first_host(nodes)}:{port}"
    if environ.get("SLURM_GPUS_ON_NODE", "").isdigit():
        found["nproc_per_node"] = environ["SLURM_GPUS_ON_NODE"]
    return found


def _mpi(environ: Mapping[str, str], rank: str, size: str, name: str) -> dict[str, str]:
    if environ.get("OMPI_COMM_WORLD_LOCAL_SIZE", "1") != "1":
        raise ValueError(
            f"{name} started several launchers on this node; one a node is needed: "
            "mpirun --map-by ppr:1:node echelon run ..."
        )
    return {"nnodes": environ[size], "node_rank": environ[rank]}
