"""The exchange of one value per member, with which every group begins."""

from __future__ import annotations

import pytest

from echelon.dist.backends.interface import Members
from echelon.dist.membership.meet import arrive, exchange
from echelon.errors import CollectiveTimeoutError, StoreTimeoutError
from echelon.store import MemoryStore, PrefixStore

MEMBERS = [Members(name="world", rank=rank, ranks=(0, 1)) for rank in range(2)]


class _Late(PrefixStore):
    """Its waits run out while this rank stands still, whatever happens meanwhile."""

    def __init__(self, happen=lambda _: None) -> None:
        super().__init__("group", MemoryStore())
        self._happen = happen

    def wait(self, keys, timeout=None, **_):
        self._happen(self)
        raise StoreTimeoutError("wait after 1.0 s", missing=keys)


def test_a_rank_that_stood_still_past_its_deadline_takes_what_all_have_brought():
    late = _Late(lambda store: arrive(MEMBERS[1], store, "facts", "b"))
    assert exchange(MEMBERS[0], late, "facts", "a", 0.0) == ["a", "b"]


def test_a_rank_that_did_not_arrive_is_named():
    with pytest.raises(CollectiveTimeoutError, match="missing: 1") as caught:
        exchange(MEMBERS[0], _Late(), "facts", "a", 0.0)
    assert caught.value.ranks == (1,)
