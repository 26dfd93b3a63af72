"""`echelon doctor --pairwise`: on one host, and between hosts with slow and blocked links."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from echelon.launcher.doctor.doctor import main
from echelon.launcher.doctor.pairwise.collective import run_options
from echelon.launcher.doctor.pairwise.outcome import Outcome
from echelon.launcher.doctor.pairwise.text import lines
from echelon.launcher.doctor.probes.finding import Finding, State
from tests.support.hosts import Host, hosts, needs_hosts, needs_wire


def _pair(latency_s=1e-4, sent=1e9, received=1e9):
    figures = {"latency_s": latency_s, "sent_bytes_per_s": sent, "received_bytes_per_s": received}
    return Finding(probe="network", state=State.WHOLE, text="", figures=figures)


def test_what_is_broken_and_what_is_slow_is_marked_and_named():
    broken = Finding(probe="network", state=State.BROKEN, text="no way to c: timed out")
    full = Finding(probe="storage", state=State.BROKEN, text="cannot write in /r: no space")
    pairs = {(0, 1): _pair(), (0, 2): _pair(), (1, 2): broken, (0, 3): _pair(), (1, 3): _pair()}
    pairs[2, 3] = _pair(received=1e7)
    outcome = Outcome(
        hosts=list("abcd"), names=list("abcd"), pairs=pairs, nodes=[[], [full], [], []]
    )
    text = list(lines(outcome))
    assert not outcome.is_whole
    assert "! b - c  broken" in text
    assert any(line.startswith("~ c - d ") for line in text), text
    assert any(line.startswith("! b ") for line in text), text
    told = "c - d: bandwidth, 100.0 times worse than the median"
    assert f"~ slower than the others: {told}" in text
    assert "! broken: b: no way to c: timed out" in text
    assert "! broken: b: storage: cannot write in /r: no space" in text
    assert Outcome.from_json(json.loads(json.dumps(outcome.to_json()))) == outcome


def test_slow_is_not_broken():
    pairs = {(0, 1): _pair(), (0, 2): _pair(), (1, 2): _pair(latency_s=1.0)}
    outcome = Outcome(hosts=list("abc"), names=list("abc"), pairs=pairs)
    assert outcome.is_whole
    assert dict(outcome.slow()).keys() == {"b - c"}


def test_a_slow_host_is_compared_with_the_best_pairs_of_the_others():
    """Of three hosts two pairs of three are slow: the median pair is one of them."""
    pairs = {(0, 1): _pair(), (0, 2): _pair(latency_s=5e-3), (1, 2): _pair(latency_s=5e-3)}
    outcome = Outcome(hosts=list("abc"), names=list("abc"), pairs=pairs)
    said = "latency of all its pairs, 50.0 times worse than the median of the others' best"
    assert list(outcome.slow()) == [("c", said)]


def test_many_pairs_are_shown_by_the_worst_of_them():
    names = [f"n{number}" for number in range(20)]
    pairs = {(a, b): _pair() for a in range(20) for b in range(a + 1, 20)}
    pairs[3, 17] = _pair(latency_s=0.5)
    text = list(lines(Outcome(hosts=names, names=names, pairs=pairs)))
    assert len(text) < 40
    assert any(line.startswith("~ n3 - n17 ") for line in text)
    assert "  and 162 pairs with a lower latency" in text


@pytest.mark.parametrize(
    ("given", "options"),
    [
        ({}, ["--standalone"]),
        (
            {"rdzv_endpoint": "a:1", "nnodes": (2, 4), "node_rank": 0, "rdzv_conf": {"x": "1"}},
            ["--nnodes", "4", "--rdzv-endpoint", "a:1", "--node-rank", "0", "--rdzv-conf", "x=1"],
        ),
    ],
)
def test_the_ranks_are_placed_as_those_of_the_job(given, options):
    names = ("endpoint", "secret_file", "cert", "key", "ca")
    args = {f"rdzv_{name}": "" for name in names}
    args |= {"master_addr": "", "bind": "", "master_port": 0, "node_rank": -1, "rdzv_conf": {}}
    args |= {"nproc_per_node": 8, "nnodes": (1, 1), **given}
    assert run_options(args) == ["--nproc-per-node", "8", *options]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--pairwise", "--nnodes", "2"], "--rdzv-endpoint HOST:PORT"),
        (["--pairwise", "--nproc-per-node", "0"], "nproc-per-node"),
    ],
)
def test_bad_usage_is_one_line(argv, said, capsys):
    with pytest.raises(SystemExit) as exit_info:
        main(argv)
    assert exit_info.value.code == 2
    text = capsys.readouterr().err
    assert said in text
    assert text.count("\n") == 1


def _doctor(*argv: str, before: Sequence[str] = ()) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*before, sys.executable, "-m", "echelon", "doctor", "--pairwise", "--json", *argv],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "ECHELON_SECRET": "a-secret-of-the-tests", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def _ended(doctors: Sequence[subprocess.Popen[str]]) -> list[dict]:
    try:
        said = [doctor.communicate(timeout=300) for doctor in doctors]
    finally:
        for doctor in doctors:
            doctor.kill()
            doctor.wait()
    found = []
    for out, err in said:
        assert out, err
        found.append(json.loads(out))
    return found


@pytest.mark.ranks
def test_ranks_of_one_host_measure_each_pair_and_an_all_reduce(tmp_path):
    doctor = _doctor("--nproc-per-node", "3", "--run-dir", str(tmp_path))
    (found,) = _ended([doctor])
    pairwise = found["pairwise"]
    assert doctor.returncode == 0, found
    assert [one["pair"] for one in pairwise["pairs"]] == [[0, 1], [0, 2], [1, 2]]
    assert all(one["figures"]["latency_s"] > 0 for one in pairwise["pairs"])
    assert pairwise["collective"]["ranks"] == 3
    assert pairwise["collective"]["backend"] == "shm"
    assert [one["probe"] for one in pairwise["nodes"][0]] == ["storage", "memory", "device"]
    assert list(tmp_path.iterdir()) == []  # nothing of the probe is left


def _on(machines: Sequence[Host], folders: Sequence[Path]) -> list[subprocess.Popen[str]]:
    meeting = ["--rdzv-endpoint", f"{machines[0].address}:29400", "--nnodes", str(len(machines))]
    return [
        _doctor(
            *meeting, "--node-rank", str(rank), "--run-dir", str(folder), "--nproc-per-node", "1",
            before=host.command(),
        )
        for rank, (host, folder) in enumerate(zip(machines, folders, strict=True))
    ]  # fmt: skip


def _name(pairwise: dict, host: Host) -> str:
    """Return how a host is named: all have the machine's own name here."""
    (name,) = [name for name in pairwise["hosts"] if name.endswith(f"@{host.address}")]
    return name


@pytest.mark.netns
@needs_hosts
@needs_wire
def test_a_blocked_link_a_slow_host_and_a_disk_that_cannot_be_written_are_named_on_all_nodes(
    tmp_path,
):
    """Hosts 1 and 2 do not reach each other, host 2 has no folder, host 3 is slow."""
    with hosts(4, wired=[3]) as made:
        assert made[3].wire is not None
        made[3].wire.delay_s = 0.02  # far above what a busy machine adds
        made[1].lose_way_to(made[2])
        doctors = _on(made, [tmp_path, tmp_path, tmp_path / "none", tmp_path])
        told = _ended(doctors)
    for doctor, found in zip(doctors, told, strict=True):
        assert doctor.returncode == 1, found
        pairwise = found["pairwise"]
        names = [_name(pairwise, host) for host in made]
        (broken,) = [one for one in pairwise["pairs"] if one["state"] == "broken"]
        assert {pairwise["hosts"][place] for place in broken["pair"]} == set(names[1:3])
        assert sum(one["state"] == "whole" for one in pairwise["pairs"]) == 5
        slow = {one["what"] for one in pairwise["slow"] if one["how"].startswith("latency")}
        assert slow == {names[3]}, pairwise
        disks = {
            name: node[0]["state"]
            for name, node in zip(pairwise["hosts"], pairwise["nodes"], strict=True)
        }
        assert [disks[name] for name in names] == ["whole", "whole", "broken", "whole"]
        assert pairwise["collective"]["error"].startswith("not run"), pairwise


@pytest.mark.netns
@pytest.mark.slow
@needs_hosts
def test_the_ranks_of_all_nodes_measure_an_all_reduce(tmp_path):
    with hosts(2) as made:
        doctors = _on(made, [tmp_path] * 2)
        told = _ended(doctors)
    for doctor, found in zip(doctors, told, strict=True):
        assert doctor.returncode == 0, found
        assert found["pairwise"]["collective"]["ranks"] == 2, found
        assert len(found["pairwise"]["pairs"]) == 1
