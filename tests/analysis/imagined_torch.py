"""Make torch's flight recorder dumps of imagined ranks, in its NCCL and Gloo forms."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

WALL_NS = 1_795_000_000_000_000_000


class TorchRank:
    """One imagined rank's dump."""

    def __init__(self, rank: int, world_size: int, backend: str) -> None:
        self.rank = rank
        self.backend = backend
        self.entries: list[dict[str, object]] = []
        self.counts: dict[str, list[int]] = {}
        self.config = {
            "0": {"name": "0", "desc": "default_pg", "ranks": str(list(range(world_size)))}
        }
        self.version = "2.10"
        self.status: dict[str, dict[str, int]] = {}
        self.only_active = False

    def call(
        self,
        operation: str = "all_reduce",
        *,
        group: tuple[str, str] = ("0", "default_pg"),
        sizes: list[list[int]] | None = None,
        outputs: list[list[int]] | None = None,
        dtype: str = "Float",
        state: str = "completed",
        p2p: bool = False,
        same_block: bool = False,
        line: int = 10,
        **fields: object,
    ) -> TorchRank:
        counts = self.counts.setdefault(group[0], [0, 0, 0])
        counts[2] += operation != "coalesced"  # the end of a block is no operation of its own
        if not same_block:
            counts[1 if p2p else 0] += 1
        sizes = [[4, 4]] if sizes is None else sizes
        outputs = sizes if outputs is None else outputs
        done = state == "completed"
        now = WALL_NS + 1_000_000 * len(self.entries)
        gloo = self.backend == "gloo"
        self.entries.append(
            {
                "frames": [{"name": "step", "filename": "/srv/job/train.py", "line": line}],
                "record_id": len(self.entries),
                "pg_id": int(group[0]) if group[0].isdigit() else 9,
                "process_group": group,
                "collective_seq_id": counts[0],
                "p2p_seq_id": counts[1],
                "op_id": counts[2],
                "profiling_name": f"{self.backend}:{operation}",
                "time_created_ns": now,
                "input_sizes": sizes,
                "output_sizes": outputs,
                "input_dtypes": [dtype] * len(sizes),
                "output_dtypes": [dtype] * len(outputs),
                "state": "scheduled" if gloo else state,
                "time_discovered_started_ns": now if state != "scheduled" and not gloo else None,
                "time_discovered_completed_ns": now + 1000 if done and not gloo else None,
                "retired": done,
                "timeout_ms": 600000,
                "is_p2p": p2p,
                **fields,
            }
        )
        return self

    def send(self, to: int, state: str = "completed", **how: object) -> TorchRank:
        return self.call(f"send {self.rank}->{to}", p2p=True, state=state, **how)

    def recv(self, source: int, state: str = "completed", **how: object) -> TorchRank:
        return self.call(f"recv {self.rank}<-{source}", p2p=True, state=state, **how)

    def top(self) -> dict[str, object]:
        status = self.status or {
            name: {
                "last_enqueued_collective": counts[2 if self.backend == "gloo" else 0] or counts[1],
                "last_started_collective": -1,
                "last_completed_collective": -1,
            }
            for name, counts in self.counts.items()
        }
        return {
            "version": self.version,
            "pg_config": self.config,
            "pg_status": status,
            "entries": [
                one
                for one in self.entries
                if not (self.only_active and one["time_discovered_completed_ns"])
            ],
        }


class TorchJob:
    """An imagined job under torch."""

    def __init__(self, world_size: int, backend: str = "nccl") -> None:
        self.ranks = [TorchRank(rank, world_size, backend) for rank in range(world_size)]

    def __getitem__(self, rank: int) -> TorchRank:
        return self.ranks[rank]

    def others(self, *but: int) -> list[TorchRank]:
        return [rank for rank in self.ranks if rank.rank not in but]

    def all_call(self, times: int = 1, **how: object) -> TorchJob:
        for _ in range(times):
            for rank in self.ranks:
                rank.call(**how)
        return self

    def write(self, folder: Path, *, lost: tuple[int, ...] = (), as_json: bool = False) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        for rank in self.others(*lost):
            path = folder / f"nccl_trace_rank_{rank.rank}"
            if as_json:
                path.write_text(json.dumps(_as_json(rank.top())))
            else:
                path.write_bytes(pickle.dumps(rank.top(), protocol=2))
        return folder


def _as_json(top: dict[str, object]) -> dict[str, object]:
    """Write as torch's JSON does: no frames, None as 0, status values as strings."""
    entries = [
        {key: 0 if value is None else value for key, value in entry.items() if key != "frames"}
        for entry in top["entries"]
    ]
    status = {
        key: {name: str(count) for name, count in value.items()}
        for key, value in top["pg_status"].items()
    }
    return {**top, "entries": entries, "pg_status": status}
