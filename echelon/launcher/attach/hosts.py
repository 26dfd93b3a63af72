"""Examine the ranks on other machines over ssh, and combine the results.

The remote side runs `fr-analyze --attach --collect`, which writes one msgpack map to standard
output. The map contains dumps. It does not contain pickles, and nothing in it is executed on this
machine.
"""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack

from echelon.errors import DumpFormatError
from echelon.launcher.attach.look import Sighting
from echelon.recorder.read import read
from echelon.recorder.read.dump import pack_dump

KIND = "echelon-sighting"
_MAX_BYTES = 1 << 30
_EXTRA_S = 60.0  # for the login, and the start of Python


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """One machine's answer: the result of examining the machine's ranks, or an error message."""

    host: str
    sighting: Sighting | None = None
    world_size: int = 0
    problem: str = ""


def pack(sighting: Sighting, world_size: int) -> bytes:
    """Encode the result of this machine's examination for the requesting machine."""
    data: bytes = msgpack.packb(
        {
            "kind": KIND,
            "world_size": world_size,
            "gap_s": sighting.gap_s,
            "waiting": list(sighting.waiting),
            "went_on": list(sighting.went_on),
            "changed": list(sighting.changed),
            "ended": [[rank, how] for rank, how in sighting.ended.items()],
            "notes": list(sighting.notes),
            "is_watched": sighting.is_watched,
            "dumps": [pack_dump(record) for record in sighting.records],
        },
        use_bin_type=True,
    )
    return data


def unpack(host: str, data: bytes, folder: Path) -> Answer:
    """Decode a machine's answer, and store its dumps in `folder`."""
    try:
        values = msgpack.unpackb(data, raw=False, strict_map_key=True)
        if not isinstance(values, dict) or values.get("kind") != KIND:
            raise ValueError("the answer does not describe a machine's ranks")
        records = []
        for number, dump in enumerate(values["dumps"]):
            path = folder / f"dump_{number}"
            path.write_bytes(dump)
            records.append(read(path))
        sighting = Sighting(
            records=tuple(records),
            gap_s=float(values["gap_s"]),
            waiting=_ranks(values["waiting"]),
            went_on=_ranks(values["went_on"]),
            changed=_ranks(values["changed"]),
            ended={rank: str(how)[:80] for rank, how in values["ended"] if _ranks([rank])},
            notes=tuple(f"{host}: {str(note)[:300]}" for note in values["notes"][:16]),
            is_watched=values["is_watched"] is True,
        )
        return Answer(host=host, sighting=sighting, world_size=int(values["world_size"]))
    except (ValueError, TypeError, KeyError, DumpFormatError, msgpack.UnpackException) as err:
        return Answer(host=host, problem=f"cannot read its answer ({err})")


def ask_all(
    hosts: Sequence[str], command: Sequence[str], remote: str, gap_s: float, folder: Path
) -> list[Answer]:
    """Examine the ranks on several machines concurrently, twice on each machine.

    Args:
        command: the command that connects to a machine, such as `ssh` with options. The host name
            and `remote` are appended.
        remote: the command line to run on each machine.
        gap_s: the time between the two examinations, in seconds.
    """
    answers: list[Answer | None] = [None] * len(hosts)

    def ask(place: int, host: str) -> None:
        below = folder / str(place)
        below.mkdir(parents=True)
        answers[place] = _ask(host, [*command, host, remote], gap_s + _EXTRA_S, below)

    threads = [threading.Thread(target=ask, args=pair, daemon=True) for pair in enumerate(hosts)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [
        answer or Answer(host=host, problem="no answer")
        for host, answer in zip(hosts, answers, strict=True)
    ]


def merge(here: Sighting | None, answers: Sequence[Answer]) -> Sighting:
    """Combine the examination results of all machines, with one record per rank."""
    seen = [answer.sighting for answer in answers if answer.sighting is not None]
    parts = ([here] if here is not None else []) + seen
    records: dict[int, Any] = {}
    for part in parts:
        for record in part.records:
            records.setdefault(record.identity.rank, record)
    problems = tuple(f"{answer.host}: {answer.problem}" for answer in answers if answer.problem)
    return Sighting(
        records=tuple(records[rank] for rank in sorted(records)),
        gap_s=min((part.gap_s for part in parts), default=0.0),
        waiting=_joined(part.waiting for part in parts),
        went_on=_joined(part.went_on for part in parts),
        changed=_joined(part.changed for part in parts),
        left=here.left
        if here is not None and not seen
        else (),  # known only for one machine's ranks
        ended={rank: how for part in parts for rank, how in part.ended.items()},
        notes=(*(note for part in parts for note in part.notes), *problems),
        is_whole=any(part.is_whole for part in parts),
        is_watched=any(part.is_watched for part in parts),
    )


def _joined(parts: Any) -> tuple[int, ...]:
    return tuple(sorted({rank for part in parts for rank in part}))


def _ranks(values: Any) -> tuple[int, ...]:
    return tuple(one for one in values if isinstance(one, int) and 0 <= one < 1 << 18)


def _ask(host: str, command: Sequence[str], limit_s: float, folder: Path) -> Answer:
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=limit_s, check=False
        )
    except (OSError, subprocess.SubprocessError) as err:
        return Answer(host=host, problem=str(err)[:200])
    if len(done.stdout) > _MAX_BYTES or not done.stdout:
        said = done.stderr.decode("utf-8", "replace").strip().splitlines()
        return Answer(host=host, problem=said[-1][:200] if said else f"exit {done.returncode}")
    return unpack(host, done.stdout, folder)
