"""Read a worker's environment variables: those that torchrun sets, and echelon's own.

| variable | meaning |
|---|---|
| RANK, WORLD_SIZE | this process's rank and the world size; if neither is set, a world of one |
| LOCAL_RANK, LOCAL_WORLD_SIZE | this process's rank and the number of ranks within this node |
| MASTER_ADDR, MASTER_PORT | the store |
| TORCHELASTIC_USE_AGENT_STORE | "True": the launcher hosts the store; otherwise, rank 0 hosts it |
| TORCHELASTIC_RUN_ID, TORCHELASTIC_RESTART_COUNT | the namespace of this attempt's keys |
| ECHELON_ON_LOSS | "shrink" or "replace": the launcher's response to the death of a rank |
| ECHELON_JOIN_AFTER | an epoch's number; this process joins a running world in a later epoch |
| ECHELON_LIFE | the number of earlier processes that had this rank in this attempt |
| ECHELON_SHM | "python": use the shm backend's pure-Python engine, even if the C core was built |
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from echelon.recorder.continuation import REPLACE


@dataclass(frozen=True, kw_only=True, slots=True)
class Rendezvous:
    """This process's rank in the world, and the store through which the ranks find each other."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    master_addr: str = ""
    master_port: int = 0
    hosts_store: bool = False  # this rank does
    rank_0_hosts_store: bool = False
    namespace: str = ""
    may_grow: bool = False  # other ranks may join, even a world of one rank
    join_after: int = -1  # of a process that joins a running world: the newest epoch at its start
    life: int = 0  # how many processes held this rank before

    @classmethod
    def from_environment(cls) -> Rendezvous:
        """Read the worker's environment variables.

        Raises:
            ValueError: some variables are set, but related variables are missing or invalid.
        """
        if "RANK" not in os.environ and "WORLD_SIZE" not in os.environ:
            return cls()
        rank, world_size = _number("RANK"), _number("WORLD_SIZE")
        if not 0 <= rank < world_size:
            raise ValueError(f"RANK={rank} must be >= 0 and less than WORLD_SIZE={world_size}")
        if world_size == 1 and "MASTER_ADDR" not in os.environ:
            return cls()
        agent_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        return cls(
            rank=rank,
            world_size=world_size,
            local_rank=_number("LOCAL_RANK", rank),
            local_world_size=_number("LOCAL_WORLD_SIZE", world_size),
            master_addr=_text("MASTER_ADDR"),
            master_port=_number("MASTER_PORT"),
            hosts_store=rank == 0 and not agent_store,
            rank_0_hosts_store=not agent_store,
            namespace=(
                f"echelon/{os.environ.get('TORCHELASTIC_RUN_ID', 'none')}"
                f"/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
            ),
            may_grow=agent_store and on_loss() == REPLACE,
            join_after=_number("ECHELON_JOIN_AFTER", -1),
            life=_number("ECHELON_LIFE", 0),
        )


def num_ranks_here(at_least: int) -> int:
    """Return LOCAL_WORLD_SIZE if it is set and larger than `at_least`, otherwise `at_least`."""
    return max(at_least, _number("LOCAL_WORLD_SIZE", at_least))


def local_rank() -> int:
    """Return this rank's index within its node, or its global rank if LOCAL_RANK is not set.

    Raises:
        ValueError: the value of LOCAL_RANK, or of RANK if it is used instead, is not a number.
    """
    return _number("LOCAL_RANK", _number("RANK", 0))


def on_loss() -> str:
    """Return what the launcher does when a rank dies.

    Returns:
        "shrink" or "replace"; "" if the launcher ends the attempt.
    """
    return os.environ.get("ECHELON_ON_LOSS", "")


def wants_python_engine() -> bool:
    """Return whether the user requested the shm backend's pure-Python engine.

    Raises:
        ValueError: ECHELON_SHM is set to a value other than "python" and "native".
    """
    value = os.environ.get("ECHELON_SHM", "")
    if value not in ("", "python", "native"):
        raise ValueError(f"ECHELON_SHM must be 'python' or 'native', got {value!r}")
    return value == "python"


def _text(name: str) -> str:
    value = os.environ.get(name)
    if not value:
        raise ValueError(
            f"{name} is not set, but every rank of a job needs it: start the script with "
            "`echelon run` or torchrun, or unset RANK and WORLD_SIZE for a world of one"
        )
    return value


def _number(name: str, default: int | None = None) -> int:
    if default is not None and name not in os.environ:
        return default
    text = _text(name)
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{name}={text!r} is not a number") from None
