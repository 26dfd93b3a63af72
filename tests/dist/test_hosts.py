"""Two hosts of two ranks each, as network namespaces: the default backend keeps the contract."""

from __future__ import annotations

import pytest

from tests.support.hosts import hosts, needs_hosts, run_text_on

_RANK = """
import sys
import echelon.dist as dist
from tests.dist import contract
world = dist.init(timeout_s=60)
assert world.backend == "shm+gloo", world.backend
checks = contract.CHECKS
if sys.argv[1] == "few":  # those that move much, or rely on the way between hosts
    checks = [contract.check_large, contract.check_movement, contract.check_async,
              contract.check_messages, contract.check_message_order, contract.check_objects,
              contract.check_split, contract.check_barrier]
for check in checks:
    check(world, contract.Traits(ordered=False, is_slow=True))
dist.shutdown()
"""


@pytest.mark.netns
@needs_hosts
@pytest.mark.parametrize("checks", ["few", pytest.param("all", marks=pytest.mark.slow)])
def test_two_hosts_of_two_ranks_keep_the_contract(checks):
    pytest.importorskip("torch")
    with hosts(2) as machines:
        ends = run_text_on(machines, _RANK, checks, timeout_s=400)
    assert [end.returncode for end in ends] == [0] * 4, "\n".join(end.stderr for end in ends)
