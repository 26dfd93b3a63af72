"""Nodes under suspicion between two attempts: asked, waited for, excluded. No process, no clock."""

from __future__ import annotations

import pytest

from echelon.launcher.control import messages as m
from echelon.launcher.coordinator.gathering.roster import Node, Roster
from echelon.launcher.coordinator.policy.failure import Failure
from echelon.launcher.coordinator.policy.probes import PATIENCE_S
from echelon.launcher.coordinator.restart.probing import Probing, evidence
from echelon.launcher.doctor.probes.finding import LISTEN, Finding, State, Task
from echelon.launcher.options.options import parse


class _Nodes:
    """A job's nodes that answer probes as the test says; `broken`: (node, probe) that fail."""

    def __init__(self, *names: str, spares: int = 0, argv: tuple[str, ...] = ()) -> None:
        low = len(names) - spares
        more = ["--nnodes", str(low), "--spares", str(spares)]
        more += ["--rdzv-endpoint", "127.0.0.1:1"] if low > 1 else []
        options = parse(
            [*more, *argv, "--no-python", "true"], {"ECHELON_SECRET": "a-secret-of-the-tests"}
        )
        self.roster = Roster(low, low, spares=spares, join_timeout_s=60)
        for number, name in enumerate(names):
            address = f"10.0.0.{number}" if number else ""
            self.roster.join(
                Node(name=name, host=f"host-{name}", num_workers=1, address=address), 0
            )
        self.decisions: list[dict] = [{"attempt": 0}]
        self.asked: list[tuple[str, list[Task]]] = []
        self.said: list[str] = []
        self.broken: set[tuple[str, str]] = set()
        self.silent: set[str] = set()
        self.probing = Probing(
            options, self.roster, lambda: self.decisions, self._send, self.said.append, "10.0.0.9"
        )
        self._sent: list[tuple[str, m.Probe]] = []

    def _send(self, node: str, command: m.Command) -> None:
        assert isinstance(command, m.Probe)
        self.asked.append((node, [Task.unpack(text) for text in command.tasks]))
        self._sent.append((node, command))

    def fail(self, cause: str, *nodes: str, is_outside: bool = False) -> None:
        failure = Failure(attempt=0, cause=cause, nodes=nodes, is_outside=is_outside)
        self.probing.begin(failure, 1, 0.0)

    def answer(self, now_s: float) -> None:
        """Step, and answer what was asked, until nothing is asked any more."""
        self.probing.step(now_s)
        while self._sent:
            node, command = self._sent.pop(0)
            if node not in self.silent:
                tasks = [Task.unpack(text) for text in command.tasks]
                found = [self._finding(node, task).pack() for task in tasks]
                self.probing.take(node, m.Probed(number=command.number, findings=found))
            self.probing.step(now_s)

    def _finding(self, node: str, task: Task) -> Finding:
        if task.probe == LISTEN:
            return Finding(probe=LISTEN, state=State.WHOLE, text="", figures={"port": 77.0})
        is_broken = (node, task.probe) in self.broken
        state = State.BROKEN if is_broken else State.WHOLE
        return Finding(probe=task.probe, state=state, text="bad" if is_broken else "good")


def test_a_failure_that_asks_for_nothing_delays_nothing():
    nodes = _Nodes("a", "b")
    nodes.fail("exception", "b")
    assert nodes.probing.is_over
    nodes.probing.begin(None, 1, 0.0)
    assert nodes.probing.is_over


def test_a_suspect_that_is_whole_is_used_again_and_its_figures_are_kept():
    nodes = _Nodes("a", "b")
    nodes.fail("dead_process", "b")
    assert nodes.probing.waits_for == "probes of host-b (memory, device)"
    nodes.answer(0.0)
    assert nodes.probing.is_over
    assert [(node, [task.probe for task in tasks]) for node, tasks in nodes.asked] == [
        ("b", ["memory", "device"])
    ]
    kept = nodes.decisions[-1]["probes"]
    assert [(one["host"], one["probe"], one["state"], one["before"]) for one in kept] == [
        ("host-b", "memory", "whole", 1),
        ("host-b", "device", "whole", 1),
    ]
    assert nodes.said == ["probe of host-b: memory: good; device: good"]
    assert evidence(nodes.decisions)[0] == (
        "the probe before attempt 1 measured on host-b (memory): good"
    )


def test_a_failed_probe_is_repeated_with_back_off_until_it_is_whole():
    nodes = _Nodes("a", "b")
    nodes.broken = {("b", "storage")}
    nodes.fail("storage_stall", "b")
    at_s = 0.0
    for wait in (1, 2, 4):
        nodes.answer(at_s)
        assert nodes.said[-1] == f"probe of host-b failed: storage: bad; next probe in {wait} s"
        assert nodes.probing.deadline_s() == at_s + wait
        num_asked = len(nodes.asked)
        nodes.probing.step(at_s + wait - 0.1)
        assert len(nodes.asked) == num_asked
        at_s += wait
    nodes.broken = set()
    nodes.answer(at_s)
    assert nodes.probing.is_over
    states = [one["state"] for one in nodes.decisions[-1]["probes"]]
    assert states == ["broken", "broken", "broken", "whole"]
    assert "failed on host-b (storage): bad" in evidence(nodes.decisions)[0]


@pytest.mark.parametrize(
    ("cause", "probe", "tries"), [("device_stuck", "device", 1), ("storage_stall", "storage", 3)]
)
def test_a_node_that_stays_broken_is_replaced_where_another_one_can(cause, probe, tries):
    nodes = _Nodes("a", "b", "c", spares=1)
    nodes.broken = {("b", probe)}
    nodes.fail(cause, "b")
    at_s = 0.0
    for number in range(1, tries + 1):
        assert not nodes.probing.is_over, number
        nodes.answer(at_s)
        at_s = nodes.probing.deadline_s()
    assert nodes.probing.is_over
    assert nodes.roster.avoided == ("b",)
    assert nodes.said[-1] == f"probe of host-b failed: {probe}: bad; excluded"
    assert nodes.decisions[-1]["excluded"] == ["host-b"]


def test_where_none_may_replace_it_a_node_is_waited_for_and_used_at_last():
    never = _Nodes("a", "b", "c", spares=1, argv=("--exclude-after", "0"))
    for nodes in (_Nodes("a", "b"), never):
        nodes.broken = {("b", "device")}
        nodes.fail("device_stuck", "b")
        at_s, num_rounds = 0.0, 0
        while not nodes.probing.is_over:
            nodes.answer(at_s)
            num_rounds += 1
            assert num_rounds < 100
            at_s = max(at_s, min(nodes.probing.deadline_s(), at_s + PATIENCE_S))
        assert nodes.roster.avoided == ()
        assert nodes.said[-1].endswith("restarting anyway")
        assert 10 < num_rounds < 20


def test_a_node_that_does_not_answer_has_failed():
    nodes = _Nodes("a", "b")
    nodes.silent = {"b"}
    nodes.fail("dead_process", "b")
    nodes.answer(0.0)
    assert nodes.probing.deadline_s() == 20.0
    nodes.probing.step(20.0)
    assert "memory: the node did not answer within 20 s" in nodes.said[-1]
    assert not nodes.probing.is_over


def test_a_link_is_measured_from_the_suspect_to_another_node_that_listens():
    nodes = _Nodes("a", "b", "c")
    nodes.fail("network", "b")
    nodes.answer(0.0)
    (listener, (listen,)), (suspect, (task,)) = nodes.asked
    assert (listener, listen.probe, suspect) == ("a", LISTEN, "b")
    assert (task.probe, task.port, task.peer) == ("network", 77, "host-a")
    assert task.address == "10.0.0.9"  # the hosting node's, which has none in the roster
    assert task.token == listen.token != ""
    assert nodes.probing.is_over


def test_of_two_suspects_the_link_between_them_is_measured_and_neither_is_excluded():
    nodes = _Nodes("a", "b", "c", "d", "e", spares=2)
    nodes.broken = {("b", "network")}
    nodes.fail("network", "b", "c")
    at_s = 0.0
    for _ in range(5):
        nodes.answer(at_s)
        at_s = nodes.probing.deadline_s()
    assert nodes.roster.avoided == ()
    asked = [(node, task.probe, task.address) for node, tasks in nodes.asked for task in tasks]
    assert asked[:2] == [("c", LISTEN, ""), ("b", "network", "10.0.0.2")]
    assert not nodes.probing.is_over


def test_a_job_of_one_node_has_no_link_to_measure():
    nodes = _Nodes("a")
    nodes.fail("network", "a")
    nodes.answer(0.0)
    assert nodes.probing.is_over
    assert nodes.decisions[-1]["probes"][0]["state"] == "not checked"
    assert evidence(nodes.decisions) == []


def test_a_suspect_that_leaves_is_not_waited_for():
    nodes = _Nodes("a", "b")
    nodes.fail("dead_process", "b")
    nodes.probing.step(0.0)
    nodes.roster.leave("b")
    nodes.probing.lose("b")
    assert nodes.probing.is_over
    nodes.fail("dead_process", "b")
    assert nodes.probing.is_over


def test_an_answer_to_an_earlier_question_does_not_count():
    nodes = _Nodes("a", "b")
    nodes.fail("dead_process", "b")
    nodes.probing.step(0.0)
    whole = [Finding(probe=p, state=State.WHOLE, text="").pack() for p in ("memory", "device")]
    nodes.probing.take("b", m.Probed(number=0, findings=whole))
    nodes.probing.step(0.1)
    assert not nodes.probing.is_over
