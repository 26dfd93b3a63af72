"""Ranks on several hosts that are killed or cut off; the hosts are believed in, not real."""

from __future__ import annotations

import signal

import pytest

from tests.dist.resilient.agent import run_watched
from tests.dist.resilient.training import train, train_on_hosts
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.ranks

_TOTAL = 8
_HOSTS = [0, 0, 1, 1]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    ((found, _, _),) = run_ranks(train, 1, tmp_path_factory.mktemp("whole"), _TOTAL, [])
    return found


def test_a_rank_and_then_the_rest_of_its_host_may_die(tmp_path, undisturbed):
    kills = [(3, "collective", 2), (2, "forward", 4)]
    codes = dict.fromkeys((2, 3), -signal.SIGKILL)
    ends, _ = run_watched(
        train_on_hosts, len(_HOSTS), tmp_path, _TOTAL, kills, _HOSTS, exit_codes=codes
    )
    assert [bits for bits, _, _ in ends] == [undisturbed] * 2
    for _, worlds, commits in ends:
        assert worlds == [(0, (), 4), (1, (3,), 3), (2, (2, 3), 2)]
        assert commits == list(range(_TOTAL))


def test_a_rank_that_is_cut_off_never_commits_another_step(tmp_path, undisturbed):
    """The others, which it leaves waiting, continue once the launcher counts it as lost."""
    ends, agent = run_watched(
        train_on_hosts, len(_HOSTS), tmp_path, _TOTAL, [(3, "stop", 4)], _HOSTS, exit_codes={}
    )
    *others, (error, worlds, commits) = ends
    assert [bits for bits, _, _ in others] == [undisturbed] * 3
    assert {size for _, seen, _ in others for _, _, size in seen} == {4, 3}
    assert "the launcher counts this rank as lost" in error
    assert (worlds, commits) == ([(0, (), 4)], [0, 1, 2, 3])
    assert agent.said[0] == "rank 3 is lost; continuing with ranks 0, 1 and 2"


def test_a_rank_that_exits_with_0_in_the_middle_is_named_at_once(tmp_path):
    """No epoch without it will come: a rank that waited for one would say something else."""
    ends, _ = run_watched(
        train_on_hosts, len(_HOSTS), tmp_path, _TOTAL, [(1, "exit", 3)], _HOSTS, exit_codes={}
    )
    assert len(ends) == len(_HOSTS) - 1
    for error, worlds, _ in ends:
        assert "rank 1 left before its last step, with exit code 0" in error
        assert worlds == [(0, (), 4)]
