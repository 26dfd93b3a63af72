"""One elector's vote, one host's lease and one node's permit, by a clock that is passed in."""

from __future__ import annotations

import select
from dataclasses import replace

import pytest

from echelon.errors import LaunchError
from echelon.launcher.control import messages as m
from echelon.launcher.control.client import GrpcLink
from echelon.launcher.election.elector import VOTE_S, Canvass, Elector
from echelon.launcher.election.fences import Fences
from echelon.launcher.election.lease import Lease, Permit
from echelon.launcher.election.mandate import (
    MAX_ELECTORS,
    WITNESS,
    Mandate,
    Member,
    ballot_of,
    electors_of,
    pack_mandate,
    unpack_mandate,
)
from echelon.launcher.election.office import KILL_S, Office, Reply
from echelon.launcher.election.witness import UNKNOWN_TERM, Renewal, Witness
from echelon.launcher.election.witness_command import WitnessServer
from echelon.launcher.options.options import parse

_P = 10.0


def _member(name: str, endpoint: str = "h:1") -> Member:
    return Member(name=name, host=name, endpoint=endpoint, num_workers=2, node_rank=-1)


def _mandate(*names: str, term: int = 0, index: int = 1) -> Mandate:
    members = tuple(map(_member, names))
    return Mandate(term=term, index=index, electorates=(names,), members=members, job_id="j")


def _elector(name: str = "b") -> Elector:
    elector = Elector(name, _P)
    elector.on_beat(0, "a", 0.0)
    elector.on_mandate(_mandate("a", "b", "c"))
    return elector


def _ask(node: str, term: int, version: tuple[int, int] = (0, 1), *, binds: bool = True) -> Canvass:
    return Canvass(node=node, term=term, version=version, is_binding=binds)


def test_no_vote_is_given_while_the_promise_lasts():
    elector = _elector()
    answer = elector.on_canvass(_ask("c", 1), _P - 0.1)
    assert not answer.granted
    assert (answer.host, answer.endpoint) == ("a", "h:1"), "it names the host instead"
    assert elector.on_canvass(_ask("c", 1), _P).granted


def test_a_dead_hosts_electors_vote_at_once_and_say_so():
    elector = _elector()
    elector.lose_host(is_dead=True)
    answer = elector.on_canvass(_ask("c", 1), 1.0)
    assert answer.granted
    assert answer.early
    late = _elector()
    late.lose_host(is_dead=False)
    assert not late.on_canvass(_ask("c", 1), 1.0).granted
    assert not late.on_canvass(_ask("c", 1), _P).early


def test_one_vote_is_given_per_term_and_given_again_to_the_same_candidate():
    elector = _elector()
    assert elector.on_canvass(_ask("c", 1), _P).granted
    assert not elector.on_canvass(_ask("b", 1), _P).granted
    assert elector.on_canvass(_ask("c", 1), _P).granted, "the answer may have been lost"
    assert not elector.on_canvass(_ask("b", 2), _P + VOTE_S - 0.1).granted
    assert elector.on_canvass(_ask("b", 2), _P + VOTE_S).granted


def test_sounding_out_binds_nobody():
    elector = _elector()
    assert elector.on_canvass(_ask("c", 7, binds=False), _P).granted
    assert elector.term == 0
    assert elector.on_canvass(_ask("b", 1), _P).granted


def test_a_candidate_that_lacks_a_change_gets_no_vote():
    elector = _elector()
    assert not elector.on_canvass(_ask("c", 1, version=(0, 0)), _P).granted
    assert not elector.on_canvass(_ask("stranger", 1), _P).granted
    assert elector.on_canvass(_ask("d", 1, version=(0, 2)), _P).granted, "an elector since"


def test_an_elector_that_a_change_removes_votes_for_one_that_lacks_only_that_change():
    """Else it may hold the last vote of the former electors, and refuse it to all that remain."""
    electorates = (("a", "b", "c", "d"), ("a", "b", "d"))
    joint = replace(_mandate("a", "b", "c", "d"), index=3, electorates=electorates)
    removed = _elector("c")
    removed.on_mandate(joint)
    removed.on_mandate(replace(joint, index=4, electorates=electorates[1:]))
    assert removed.version == (0, 4)
    assert not removed.on_canvass(_ask("b", 1, version=(0, 2)), _P).granted
    assert removed.on_canvass(_ask("b", 1, version=(0, 3)), _P).granted


def test_a_change_whose_only_former_elector_is_the_host_can_be_withdrawn():
    office = Office("a", 0, _mandate("a"), _P)
    office.propose([_member(n) for n in "abc"], attempt=0, restarts=0, num_attempts=0)
    assert office.remaining_s(0.0) == 0, "neither of the others has answered"
    office.withdraw()
    assert office.mandate.electorates == (("a",),)
    assert office.remaining_s(0.0) > 0
    office = Office("a", 0, _mandate("a", "b", "c"), _P)
    office.propose([_member(n) for n in "ade"], attempt=0, restarts=0, num_attempts=0)
    before = office.mandate
    office.withdraw()
    assert office.mandate == before, "the others may have decided by it"


def test_a_host_of_an_earlier_term_is_not_heard():
    elector = _elector()
    elector.on_canvass(_ask("c", 3), _P)
    assert not elector.on_beat(0, "a", _P)
    elector.on_mandate(_mandate("a", "b", term=0, index=9))
    assert elector.version == (0, 1)
    assert elector.on_beat(3, "c", _P)


def test_a_lease_counts_from_when_the_acknowledged_beat_was_sent():
    lease, electors = Lease("a", _P), [("a", "b", "c")]
    first = lease.beat(0.0)
    assert lease.remaining_s(electors, 0.0) == 0
    lease.acknowledge("b", first)
    assert lease.remaining_s(electors, 2.0) == pytest.approx(0.9 * _P - 2)
    lease.beat(5.0)
    assert lease.remaining_s(electors, 9.0) == 0, "nobody has replied to the second one"
    assert lease.remaining_s([("a",)], 9.0) == pytest.approx(0.9 * _P), "alone it always has one"
    assert lease.remaining_s([("a",), ("a", "b", "c")], 9.0) == 0, "every electorate counts"


def test_a_permit_counts_from_this_nodes_own_stamp():
    permit = Permit()
    stamp = permit.stamp(100.0)
    permit.extend(stamp, 4.0)
    assert permit.expires_s == 104.0
    permit.extend(999, 50.0)
    permit.extend(stamp, 1.0)
    assert permit.expires_s == 104.0, "unknown and smaller grants change nothing"


def test_a_change_of_electors_needs_both_majorities():
    office = Office("a", 0, _mandate("a", "b", "c"), _P)
    for name in ("b", "c", "d", "e"):
        office.add(name)
    office.propose([_member(n) for n in "ade"], attempt=3, restarts=0, num_attempts=1)
    index = office.mandate.index

    def hold(name: str) -> None:
        reply = Reply(term=0, number=0, stamp=1, version=(0, index))
        office.on_reply(name, reply, 0.0)

    hold("d")
    assert not office.is_held(), "a majority of the next electors only"
    hold("b")
    assert office.is_held()
    assert not office.is_held_by(["a", "d", "e"])
    assert office.mandate.member("b") is not None, "a former elector can still be asked"
    office.settle()
    assert office.mandate.electorates == (("a", "d", "e"),)
    assert office.mandate.member("b") is None


def test_the_policys_memory_stays_until_the_next_one_and_the_witness_gets_none():
    office = Office("a", 0, _mandate("a", "b", "c"), _P)
    members = [_member(name) for name in "abc"]
    office.propose(members, attempt=3, restarts=1, num_attempts=1, memory="known")
    assert unpack_mandate(pack_mandate(office.mandate)).memory == "known"
    office.propose(members, attempt=3, restarts=1, num_attempts=1)  # as a witness is followed
    assert office.mandate.memory == "known"
    before = office.mandate
    office.remember(restarts=2, num_attempts=2, memory="more")
    assert office.mandate.version > before.version
    assert office.mandate == replace(
        before, index=before.index + 1, restarts=2, num_attempts=2, memory="more"
    )
    assert ballot_of(office.mandate).memory == ""
    with pytest.raises(LaunchError, match="malformed"):
        unpack_mandate(pack_mandate(replace(office.mandate, memory=3)))


def test_a_later_term_deposes_the_host():
    office = Office("a", 0, _mandate("a"), _P)
    assert office.remaining_s(0.0) > 0
    office.on_reply("b", Reply(term=1, number=0, stamp=1, version=(1, 0)), 0.0)
    assert office.is_deposed
    assert office.remaining_s(0.0) == 0


def test_a_removed_nodes_ranks_end_with_the_last_grant():
    office = Office("a", 0, _mandate("a"), _P)
    office.add("b")
    assert office.remove("b") == float("-inf"), "it was granted nothing"
    office.add("b")
    office.on_reply("b", Reply(term=0, number=0, stamp=1, version=(0, 0)), 20.0)
    (_, beat), *_ = office.beats(20.0)
    assert beat.echo == 1
    assert office.remove("b") == pytest.approx(20.0 + beat.remaining_ms / 1e3 + KILL_S)


def test_the_host_of_two_nodes_is_the_only_elector():
    two = [_member("a"), _member("b")]
    assert electors_of(two, "a") == ("a",)
    assert electors_of([*two, _member("c")], "c") == ("c", "a", "b")
    many = [_member(f"n{i}") for i in range(40)]
    assert len(electors_of(many, "n0")) == MAX_ELECTORS
    assert electors_of([_member("a"), _member("b", ""), _member("c", "")], "a") == ("a",)


def test_a_mandate_survives_the_wire_and_garbage_does_not():
    mandate = replace(_mandate("a", "b", "c"), others=(_member("d"),))
    packed = pack_mandate(mandate)
    assert unpack_mandate(packed) == mandate
    for bad in (b"", b"{}", b"[1]", packed[:-1], packed.replace(b'"h:1"', b"7"), b"\xff",
                packed.replace(b'"term": 0', b'"term": "0"'), b"[" * 5000):  # fmt: skip
        with pytest.raises(LaunchError):
            unpack_mandate(bad)


def test_a_fence_stands_until_the_permit_ends():
    fences = Fences()
    assert fences.until_s() == float("-inf")
    fences.lose("b", "", 30.0, 20.0)
    assert fences.until_s() == 30.0
    fences.lose("c", "", 10.0, 20.0)
    assert fences.until_s() == 30.0, "a permit that has ended needs no fence"


def _renewal(number: int, *, holds: bool = True, term: int = 0, host: str = "a") -> Renewal:
    members = (_member("a"), _member("b"))
    mandate = Mandate(
        term=term, index=1, electorates=(("a", "b", WITNESS),), members=members, job_id="j",
        witness="w:1", founder="a",
    )  # fmt: skip
    return Renewal(term=term, host=host, number=number, holds=holds, promise_s=_P, mandate=mandate)


def test_a_witness_votes_once_its_promise_has_expired():
    witness = Witness()
    assert witness.on_renewal("a", _renewal(7), 0.0).number == 7
    assert not witness.on_canvass("a", _ask("b", 1), _P - 0.1).granted
    assert not witness.on_canvass("other job", _ask("b", 1), _P).granted
    assert witness.on_canvass("a", _ask("b", 1), _P).granted
    late = witness.on_renewal("a", _renewal(8), _P + 1)
    assert (late.term, late.number) == (1, 0), "the former host learns that it was replaced"


def test_a_witness_that_forgot_follows_only_a_host_that_holds_its_lease_without_it():
    witness = Witness()
    assert not witness.on_canvass("a", _ask("b", 1), 0.0).granted
    assert witness.on_renewal("a", _renewal(7, holds=False), 0.0).term == UNKNOWN_TERM
    assert not witness.on_canvass("a", _ask("b", 1), 2 * _P).granted
    assert witness.on_renewal("a", _renewal(8), 2 * _P).number == 8
    assert witness.on_renewal("a", _renewal(9, holds=False), 2 * _P).number == 9, "known since"


def test_the_host_tells_the_witness_whether_the_other_nodes_follow():
    office = Office("a", 0, _mandate("a", "b", WITNESS), _P)
    for name in ("b", WITNESS):
        office.add(name)

    def beat(now_s: float, *names: str) -> bool:
        beats = dict(office.beats(now_s))
        for name in names:
            number = beats[name].number
            office.on_reply(name, Reply(term=0, number=number, stamp=number, version=(0, 0)), now_s)
        return beats[WITNESS].holds

    beat(0.0, "b", WITNESS)
    assert beat(2.0, WITNESS)
    assert not beat(10.0, WITNESS), "b has not answered for as long as the lease lasts"
    assert office.remaining_s(10.0) > 0, "the witness has"


def test_a_witness_is_an_elector_where_nodes_alone_may_come_to_a_draw():
    nodes = [_member(f"n{i}") for i in range(12)]
    for count, votes in ((1, False), (2, True), (3, False), (4, True), (9, False), (12, False)):
        electors = electors_of(nodes[:count], "n0", has_witness=True)
        assert (WITNESS in electors) == votes, count
        assert len(electors) % 2 == 1


def test_a_node_that_dials_a_witness_in_place_of_the_host_is_refused_in_words():
    secret = b"a-secret-of-the-tests"
    server = WitnessServer("127.0.0.1:0", secret)
    hello = m.Hello(node="a", host="a", num_workers=1)
    link = GrpcLink(f"127.0.0.1:{server.port}", secret, hello, 600.0)
    try:
        ready, _, _ = select.select([link.fileno()], [], [], 60.0)
        assert ready
        assert link.take() == [None]
        assert link.lost_because == "this endpoint belongs to a witness, which does not host jobs"
    finally:
        link.close()
        server.close()


def test_a_witness_needs_failover():
    script = ["--no-python", "true"]
    meeting = ["--nnodes", "2", "--rdzv-endpoint", "127.0.0.1:1", "--rdzv-witness", "w"]
    environ = {"ECHELON_SECRET": "a-secret-of-the-tests"}
    with pytest.raises(SystemExit):
        parse([*meeting, *script], environ)
    options = parse([*meeting, "--rdzv-conf", "failover=true", *script], environ)
    assert options.witness == "w:29402"
