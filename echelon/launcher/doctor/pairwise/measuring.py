"""Measure all nodes and pairs of nodes.

The hosting node tells each node which probes to run. First, all nodes measure their own disk,
memory and devices at the same time. Then the pairs are measured in rounds, in which no node takes
part in more than one measurement. A node that does not answer is considered broken.
"""

from __future__ import annotations

from collections.abc import Sequence

from echelon.launcher.control import messages as m
from echelon.launcher.doctor.checkup import Host, Member
from echelon.launcher.doctor.pairwise.outcome import Outcome
from echelon.launcher.doctor.pairwise.schedule import rounds
from echelon.launcher.doctor.probes.finding import (
    DEADLINE_S,
    DEVICE,
    MEMORY,
    NETWORK,
    STORAGE,
    Finding,
    State,
    Task,
)

_GRACE_S = 5.0  # beyond a probe's own deadline, for the answer to arrive


def own_tasks(folder: str) -> list[Task]:
    """Return the probes for a node's own disk, memory and devices."""
    return [Task(probe=STORAGE, folder=folder), Task(probe=MEMORY), Task(probe=DEVICE)]


def measure(host: Host) -> Outcome:
    """Measure all nodes and pairs. Blocks for at most 20 s per round of probes."""
    members = host.members
    names = _names(host)
    outcome = Outcome(hosts=names, names=names)
    asked = [(member, own_tasks(member.about.folder)) for member in members]
    answers = host.probe(0, asked, DEADLINE_S + _GRACE_S)
    for member, tasks in asked:
        outcome.nodes.append(_findings(answers.get(member.name), tasks))
    for number, pairs in enumerate(rounds(len(members)), start=1):
        asked = [(members[a], [_task(host, members[b])]) for a, b in pairs]
        answers = host.probe(number, asked, DEADLINE_S + _GRACE_S)
        for pair, (member, tasks) in zip(pairs, asked, strict=True):
            (outcome.pairs[pair],) = _findings(answers.get(member.name), tasks)
    return outcome


def _task(host: Host, other: Member) -> Task:
    return Task(
        probe=NETWORK,
        address=host.address_of(other),
        port=other.about.port,
        peer=other.about.host,
        token=other.about.token,
    )


def _findings(answer: m.Probed | None, tasks: Sequence[Task]) -> list[Finding]:
    """Return one finding per task; all are BROKEN if the node did not send a valid answer."""
    try:
        found = [Finding.unpack(text) for text in answer.findings] if answer else []
    except ValueError:
        found = []
    if len(found) == len(tasks):
        return found
    why = "the node did not answer in time" if answer is None else "its answer is malformed"
    return [Finding(probe=task.probe, state=State.BROKEN, text=why) for task in tasks]


def _names(host: Host) -> list[str]:
    """Return the members' host names, with the address appended to names that are not unique."""
    hosts = [member.about.host for member in host.members]
    return [
        name if hosts.count(name) == 1 else f"{name}@{host.address_of(member)}"
        for name, member in zip(hosts, host.members, strict=True)
    ]
