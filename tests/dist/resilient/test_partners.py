"""Copies of shards on several hosts; the hosts are believed in, not real."""

from __future__ import annotations

import signal

import pytest

from tests.dist.resilient.agent import run_watched
from tests.dist.resilient.training import HALVED_STEP, SAVED_STEP, train, train_on_hosts
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.ranks

_TOTAL = 8
# Of three hosts with a rank each: the owner of some shards, and the rank that has their only other
# copy. It dies in the same step, or, if it has learned of the other death there, right after it.
_OWNER_AND_PARTNER = [(0, "forward", 5), (1, "forward", 5), (1, "before the meeting", 5)]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    ((found, _, _),) = run_ranks(train, 1, tmp_path_factory.mktemp("whole"), _TOTAL, [])
    return found


def _run(folder, hosts, kills, layout):
    codes = {rank: -signal.SIGKILL for rank, _, _ in kills}
    ends, agent = run_watched(
        train_on_hosts, len(hosts), folder, _TOTAL, kills, hosts, layout, exit_codes=codes
    )
    assert len(ends) == len(hosts) - len(codes)
    return ends, agent


def test_a_whole_host_may_die_and_then_a_rank_of_the_other_one(tmp_path, undisturbed):
    kills = [(2, "forward", 2), (3, "forward", 2), (0, "collective", 5)]
    ends, _ = _run(tmp_path, [0, 0, 1, 1], kills, "sharded")
    for bits, worlds, commits in ends:
        assert bits == undisturbed
        assert worlds[-1][1:] == ((0, 2, 3), 1)
        assert commits == list(range(_TOTAL))


def test_a_host_may_die_in_a_step_whose_copies_are_void(tmp_path):
    """Its partners have received them, and must not use them."""
    alone, whole = tmp_path / "alone", tmp_path / "whole"
    alone.mkdir()
    whole.mkdir()
    ((undisturbed, _, _),) = run_ranks(train, 1, alone, _TOTAL, [], ", halved")
    kills = [(2, "before the optimizer", HALVED_STEP), (3, "forward", HALVED_STEP)]
    ends, _ = _run(whole, [0, 0, 1, 1], kills, "sharded, halved")
    assert [(bits, commits) for bits, _, commits in ends] == [
        (undisturbed, list(range(_TOTAL)))
    ] * 2


def test_if_both_copies_are_lost_the_checkpoint_is_loaded(tmp_path, undisturbed):
    ends, agent = _run(tmp_path, [0, 1, 2], _OWNER_AND_PARTNER, "sharded and saved")
    ((bits, worlds, commits),) = ends
    assert bits == undisturbed
    assert worlds[-1][1:] == ((0, 1), 1)
    assert commits == [*range(4), *range(SAVED_STEP, _TOTAL)]
    last = agent.report.continuations[-1]
    assert (last["step"], last["repeated"], last["steps_lost"]) == (SAVED_STEP, True, 2)


def test_if_there_is_no_checkpoint_either_the_error_names_whose_shards_are_lost(tmp_path):
    ends, _ = _run(tmp_path, [0, 1, 2], _OWNER_AND_PARTNER, "sharded")
    ((error, _, _),) = ends
    assert "all copies of the state of rank 0 are lost" in error
    assert "there is no from_checkpoint=" in error
