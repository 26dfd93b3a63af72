"""Read defaults for `echelon run` from the environment that a cluster's scheduler sets.

Slurm      `srun --ntasks-per-node=1 echelon run train.py` sets the number of nodes, this node's
           rank, the endpoint (the first node of the job, and a port derived from the job ID)
           and the job's name
Kubernetes an Indexed Job sets this node's rank (JOB_COMPLETION_INDEX); the training operators
           set `PET_*` variables
MPI        `mpirun --map-by ppr:1:node echelon run ...` sets the number of nodes and this node's
           rank

Options and `PET_*` variables take precedence over these defaults. Each node must run exactly one
launcher. A multi-node job for which the scheduler started one launcher per rank is rejected.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

_FIRST_PORT = 20000
_NUM_PORTS = 20000


def defaults(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the defaults from the scheduler, keyed by option name; {} if no scheduler is found."""
    if "SLURM_JOB_ID" in environ and "SLURM_PROCID" in environ:
        return _slurm(environ)
    if "OMPI_COMM_WORLD_SIZE" in environ:
        return _mpi(environ, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")
    if "PMI_RANK" in environ and "PMI_SIZE" in environ:
        return _mpi(environ, "PMI_RANK", "PMI_SIZE")
    if "JOB_COMPLETION_INDEX" in environ:
        return {"node_rank": environ["JOB_COMPLETION_INDEX"]}
    return {}


def first_host(nodelist: str) -> str:
    """Return the first host in a compressed Slurm host list: `gpu[003-007,12],big1` -> `gpu003`."""
    first = ""
    for text, inside, comma in re.findall(r"([^\[,]*)(?:\[([^\]]*)\])?(,?)", nodelist):
        first += text + re.split(r"[,-]", inside)[0]
        if comma:
            break
    return first


def _slurm(environ: Mapping[str, str]) -> dict[str, str]:
    num_nodes = environ.get("SLURM_NNODES", environ.get("SLURM_JOB_NUM_NODES", "1"))
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


def misuse(environ: Mapping[str, str]) -> str:
    """Return an error message if the scheduler started several launchers on this node, else "".

    For Slurm, only the variables specific to a job step are checked, because Slurm sets some of the
    other variables in batch scripts too.
    """
    per_node = environ.get("SLURM_STEP_TASKS_PER_NODE", "")
    tasks, nodes = environ.get("SLURM_STEP_NUM_TASKS", ""), environ.get("SLURM_STEP_NUM_NODES", "")
    several = re.match(r"\d+", per_node)
    if environ.get("SLURM_LOCALID", "0") != "0" or (several and int(several[0]) > 1):
        what = f"{tasks} launchers on {nodes} node{'' if nodes == '1' else 's'}"
        counted = what if tasks and nodes else "several launchers on this node"
        return f"Slurm started {counted}; start one per node: `srun --ntasks-per-node=1 ...`"
    if environ.get("OMPI_COMM_WORLD_LOCAL_SIZE", "1") != "1":
        return (
            "mpirun started several launchers on this node; start one per node: "
            "`mpirun --map-by ppr:1:node ...`"
        )
    return ""


def _mpi(environ: Mapping[str, str], rank: str, size: str) -> dict[str, str]:
    return {"nnodes": environ[size], "node_rank": environ[rank]}
