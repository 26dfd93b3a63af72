"""Define the mandate: the replicated state that a node needs to replace the hosting node.

The host sends each version of the mandate to all nodes. A version takes effect once a majority of
the electors hold it. The electors are the host and the next nodes of the world in rank order, at
most nine in total. To change the electors, the host first writes a mandate that names both the
former and the next electors. Such a mandate needs a majority of each set (joint consensus).

In a world of two nodes, the host is the only elector, so the other node cannot replace it. If the
job has a witness, both nodes and the witness are electors. The witness also votes in any other
world in which the number of nodes that are electors is even.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, replace

from echelon.errors import LaunchError

MAX_ELECTORS = 9
_LEAST_ELECTORS = 3
WITNESS = "witness"  # its name as an elector; the names of nodes end in random digits


@dataclass(frozen=True, kw_only=True, slots=True)
class Member:
    """A node of the world, as described by the mandate.

    Attributes:
        endpoint: the "host:port" at which the node answers polls, and serves the job if elected.
        num_workers: how many ranks the node runs.
    """

    name: str
    host: str
    endpoint: str
    num_workers: int
    node_rank: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Mandate:
    """One version of the replicated state of a job.

    Attributes:
        term: the term of the host that wrote this version. Each election begins a later term.
        index: the number of this version within its term.
        electorates: the sets of electors. A decision needs a majority of each set.
        members: the world's nodes, in rank order.
        others: the electors that are not part of the current world but still have a vote.
        attempt: the number of the world's attempt.
        restarts: how many of `--max-restarts` have been used.
        num_attempts: how many attempts have ended.
        memory: the restart policy's memory, in the format of `policy/memory.py`.
    """

    term: int
    index: int
    electorates: tuple[tuple[str, ...], ...]
    members: tuple[Member, ...]
    others: tuple[Member, ...] = ()
    job_id: str
    attempt: int = -1
    restarts: int = 0
    num_attempts: int = 0
    memory: str = ""
    witness: str = ""  # its endpoint, "" if there is none
    founder: str = ""  # the job's first host, which no other job has

    @property
    def version(self) -> tuple[int, int]:
        """The mandate's term and index, as a tuple that is greater for a later mandate."""
        return self.term, self.index

    @property
    def electors(self) -> tuple[str, ...]:
        """The names of all electors, each listed once."""
        return tuple(dict.fromkeys(name for one in self.electorates for name in one))

    @property
    def survives_host(self) -> bool:
        """True if there are enough electors to elect another host after the loss of this host."""
        return all(len(one) >= _LEAST_ELECTORS for one in self.electorates)

    def member(self, name: str) -> Member | None:
        """Return the member, elector or witness that has the given name, or None."""
        if name == WITNESS and self.witness:
            return Member(name=name, host=name, endpoint=self.witness, num_workers=0, node_rank=-1)
        return next((one for one in (*self.members, *self.others) if one.name == name), None)

    def is_majority(self, names: Collection[str]) -> bool:
        """Return whether the given names include a majority of every electorate."""
        return all(2 * sum(name in names for name in one) > len(one) for one in self.electorates)


def electors_of(
    members: Sequence[Member], host: str, *, has_witness: bool = False
) -> tuple[str, ...]:
    """Return the electors of a world: the host and the next members in rank order.

    Args:
        members: the world's nodes, in rank order. A member without an endpoint cannot vote.
        host: the name of the hosting node, which is always an elector.
        has_witness: whether the job's witness responds. It becomes an elector if the number of
            other electors is even.
    """
    others = [one.name for one in members if one.endpoint and one.name != host]
    names = [host, *others[: MAX_ELECTORS - 1]]
    if has_witness and len(names) % 2 == 0:
        names.append(WITNESS)
    return tuple(names) if len(names) >= _LEAST_ELECTORS else (host,)


def ballot_of(mandate: Mandate) -> Mandate:
    """Return the copy of a mandate that the witness receives.

    The copy names only the electors, and omits the restart policy's memory.
    """
    found = [mandate.member(name) for name in mandate.electors if name != WITNESS]
    members = tuple(one for one in found if one is not None)
    return replace(mandate, members=members, others=(), memory="")


def pack_mandate(mandate: Mandate) -> bytes:
    """Serialize a mandate."""
    return json.dumps(asdict(mandate)).encode()


def unpack_mandate(data: bytes) -> Mandate:
    """Deserialize a mandate that was serialized by `pack_mandate`.

    Raises:
        LaunchError: the bytes are not a valid mandate.
    """
    try:
        values = json.loads(data)
        members = tuple(Member(**one) for one in values.pop("members"))
        others = tuple(Member(**one) for one in values.pop("others"))
        electorates = tuple(tuple(one) for one in values.pop("electorates"))
        mandate = Mandate(members=members, others=others, electorates=electorates, **values)
        _check(mandate)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as err:
        raise LaunchError(f"the mandate is malformed: {err}") from err
    return mandate


def _check(mandate: Mandate) -> None:
    """Check the types of the values in a received mandate.

    Raises:
        TypeError: a value has the wrong type.
        ValueError: an electorate is empty.
    """
    nodes = (*mandate.members, *mandate.others)
    numbers = (
        mandate.term, mandate.index, mandate.attempt, mandate.restarts, mandate.num_attempts,
        *(one.num_workers for one in nodes), *(one.node_rank for one in nodes),
    )  # fmt: skip
    texts = (
        mandate.job_id, mandate.witness, mandate.founder, mandate.memory,
        *(name for one in mandate.electorates for name in one),
        *(text for one in nodes for text in (one.name, one.host, one.endpoint)),
    )  # fmt: skip
    if not all(type(number) is int for number in numbers):
        raise TypeError("a numeric field is not an integer")
    if not all(type(text) is str for text in texts):
        raise TypeError("a text field is not a string")
    if not mandate.electorates or not all(mandate.electorates):
        raise ValueError("the mandate does not name any voting nodes")
