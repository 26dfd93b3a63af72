"""The order decides right: cases by hand, and random programs against a model of the memory.

No torch, no ranks: events in, actions out.
"""

from __future__ import annotations

import ast
import gc
import random
from pathlib import Path

import pytest

from echelon.dist.fsdp.order import order as order_module
from echelon.dist.fsdp.order.budget import Budget
from echelon.dist.fsdp.order.entry import UNWATCHED, Entry, State
from echelon.dist.fsdp.order.order import Order


class Facts:
    """What a unit's parameters are: all trained, fresh, without gradients, unless set."""

    def __init__(self, members=("w", "b"), frozen=False):
        self.members, self.has_frozen = set(members), frozen
        self.stale = False
        self.waiting = 0

    @property
    def trains(self):
        return bool(self.members)

    def trained(self):
        return set(self.members)

    def is_stale(self):
        return self.stale

    def has_gradients(self):
        return bool(self.waiting)


class Memory:
    """Carries actions out on paper, and objects to those that no driver could carry out."""

    def __init__(self, order):
        self.order = order
        self.state = {}
        self.collected = {}  # by entry: how often each member's gradient was taken
        self.reducing = []
        self.reduced = []

    def do(self, actions):
        for action in actions:
            getattr(self, type(action).__name__.lower())(action)
        for entry in self.order.entries:
            assert self.state.get(entry, State.SHARDED) is entry.state, entry
        return [self._short(action) for action in actions]

    def _short(self, action):
        entry = getattr(action, "entry", None)
        return f"{type(action).__name__.lower()} {entry.name}" if entry else type(action).__name__

    def gather(self, action):
        was = self.state.get(action.entry, State.SHARDED)
        assert was is (State.NEAR if action.near else State.SHARDED), action
        self.state[action.entry] = State.GATHERING

    def wait(self, action):
        assert self.state[action.entry] is State.GATHERING, action
        self.state[action.entry] = State.WHOLE

    def release(self, action):
        assert self.state[action.entry] in (State.WHOLE, State.NEAR), action
        assert not action.entry.held, action
        self.state[action.entry] = State.NEAR if action.keep_near else State.SHARDED

    def collect(self, action):
        assert self.state[action.entry] is State.WHOLE, action
        taken = self.collected.setdefault(action.entry, {})
        taken[action.member] = taken.get(action.member, 0) + 1

    def setaside(self, action):
        action.entry.facts.waiting += 1

    def reduce(self, action):
        assert action.entry not in self.reducing or self.collected.get(action.entry), action
        self.collected.pop(action.entry, None)
        action.entry.facts.waiting = 0
        self.reducing.append(action.entry)
        self.reduced.append(action.entry)

    def finish(self, action):
        assert self.reducing[0] is action.entry, action
        self.reducing.pop(0)

    def exchange(self, action):
        self.reducing.clear()

    def abandon(self, action):
        self.state[action.entry] = State.SHARDED
        self.collected.pop(action.entry, None)
        action.entry.facts.waiting = 0

    def trim(self, action):
        if action.all_buffers:
            self.reducing.clear()


def make(*names, budget=None, **settings):
    order, entries = Order(Budget(budget)), []
    for number, name in enumerate(names):
        settings_of = {"num_bytes": 100, "gradient_bytes": 100, "facts": Facts(), **settings}
        if "facts" not in settings:
            settings_of["facts"] = Facts()
        entries.append(Entry(number=number, name=name, **settings_of))
        order.add(entries[-1])
    order.budget.measure(entries)
    return order, Memory(order), entries


def forward(order, memory, entries):
    """Run forwards one after the other inside the last entry's, the root's."""
    *inner, root = entries
    said = memory.do(order.forward_begins(root, records=True, trains=True))
    for entry in inner:
        said += memory.do(order.forward_begins(entry, records=True, trains=True))
        entry.begin_call(entry.number + 1)
        said += memory.do(order.forward_ends(entry, has_graph=True))
    root.begin_call(UNWATCHED)
    return said + memory.do(order.forward_ends(root, has_graph=True))


def backward(order, memory, entries):
    *inner, root = entries
    said = memory.do(order.backward_begins())
    said += memory.do(order.outputs_have_gradients(root, UNWATCHED))
    for entry in reversed(inner):
        said += memory.do(order.outputs_have_gradients(entry, entry.number + 1))
        for member in ("w", "b"):
            said += memory.do(order.gradient_arrives(entry, member))
        said += memory.do(order.inputs_have_gradients(entry, entry.number + 1))
    for member in ("w", "b"):
        said += memory.do(order.gradient_arrives(root, member))
    said += memory.do(order.backward_ends())
    return said + memory.do(order.backward_completes())


# ---- cases ----


def test_the_first_forward_gathers_as_it_goes_and_the_second_gathers_ahead():
    order, memory, entries = make("0", "1", "2", "root")
    entries[-1].outer = True
    first = forward(order, memory, entries)
    assert first[:6] == ["gather root", "wait root", "gather 0", "wait 0", "release 0", "gather 1"]
    backward(order, memory, entries)
    second = forward(order, memory, entries)
    assert second == [
        "gather root", "gather 0", "gather 1", "wait root", "gather 2", "wait 0",
        "release 0", "wait 1", "release 1", "wait 2",
    ]  # fmt: skip


def test_backward_gathers_in_reverse_and_reduces_each_unit_when_it_is_complete():
    order, memory, entries = make("0", "1", "2", "root")
    entries[-1].outer = True
    for _ in range(2):  # from the second step on the last unit is kept for its backward
        forward(order, memory, entries)
        said = backward(order, memory, entries)
    assert [one for one in said if one.startswith("gather")] == ["gather 1", "gather 0"]
    assert [one for one in said if one.startswith("reduce")] == [
        "reduce 2", "reduce 1", "reduce 0", "reduce root",
    ]  # fmt: skip
    assert said.index("reduce 2") < said.index("collect 1")
    assert said[-3:] == ["reduce root", "Exchange", "Trim"]
    assert all(entry.state is State.SHARDED for entry in entries)


def test_a_third_reduction_waits_for_the_first():
    order, memory, entries = make("0", "1", "2", "3", "root")
    entries[-1].outer = True
    forward(order, memory, entries)
    said = backward(order, memory, entries)
    kinds = [one for one in said if one.startswith(("reduce", "finish"))]
    assert kinds == [
        "reduce 3", "reduce 2", "finish 3", "reduce 1", "finish 2", "reduce 0",
        "finish 1", "reduce root",
    ]  # fmt: skip


@pytest.mark.parametrize(("budget", "ahead"), [(0, 1), (599, 1), (600, 2), (1200, 4), (None, 4)])
def test_the_budget_bounds_what_is_gathered_ahead_but_for_one_unit(budget, ahead):
    order, memory, entries = make("0", "1", "2", "3", "4", "root", budget=budget, depth=4)
    entries[-1].outer = True
    forward(order, memory, entries)
    backward(order, memory, entries)
    memory.do(order.forward_begins(entries[-1], records=True, trains=True))
    gathering = [entry for entry in entries if entry.state is State.GATHERING]
    assert len(gathering) == ahead


def test_containers_do_not_count_for_the_default_budget():
    order, _, entries = make("0", "1", "root")
    entries[-1].num_bytes = 10_000
    entries[-1].outer = True
    order.budget.measure(order.entries)
    assert order.budget.third == 200


def test_a_stale_unit_is_gathered_again():
    order, memory, (entry,) = make("0", reshard=False)
    memory.do(order.forward_begins(entry, records=False, trains=False))
    memory.do(order.forward_ends(entry, has_graph=False))
    entry.facts.stale = True
    said = memory.do(order.forward_begins(entry, records=False, trains=False))
    assert said == ["release 0", "gather 0", "wait 0"]


def test_a_run_without_gradients_of_parameters_keeps_everything_for_the_next():
    order, memory, entries = make("0", "root")
    entries[-1].outer = True
    forward(order, memory, entries)
    memory.do(order.backward_begins())
    memory.do(order.outputs_have_gradients(entries[0], 1))
    assert memory.do(order.backward_ends()) == []
    assert not order.in_backward
    said = backward(order, memory, entries)
    assert [one for one in said if one.startswith("reduce")] == ["reduce 0", "reduce root"]


def test_an_event_after_a_failure_starts_over():
    order, memory, entries = make("0", "1", "root")
    memory.do(order.forward_begins(entries[-1], records=True, trains=True))
    memory.do(order.forward_begins(entries[0], records=True, trains=True))
    order.fail()
    said = memory.do(order.forward_begins(entries[-1], records=True, trains=True))
    assert said[:5] == ["Trim", "abandon 0", "abandon 1", "abandon root", "Trim"]
    assert entries[0].state is not State.WHOLE


def test_a_gradient_of_a_released_unit_is_an_error():
    order, memory, entries = make("0", "root")
    forward(order, memory, entries)
    memory.do(order.backward_begins())
    with pytest.raises(RuntimeError, match="the gradient of w was computed while unit '0' was sh"):
        order.gradient_arrives(entries[0], "w")


def test_a_unit_called_on_raw_inputs_and_on_its_own_outputs_is_reduced_once():
    """The call on raw inputs comes last in backward, and no gradient of an input ends it."""
    order, memory, (entry, root) = make("0", "root")
    memory.do(order.forward_begins(root, records=True, trains=True))
    for call in (UNWATCHED, 7):
        memory.do(order.forward_begins(entry, records=True, trains=True))
        entry.begin_call(call)
        memory.do(order.forward_ends(entry, has_graph=True))
    memory.do(order.forward_ends(root, has_graph=True))
    memory.do(order.backward_begins())
    memory.do(order.outputs_have_gradients(root, None))
    memory.do(order.gradient_arrives(root, "b"))
    said = memory.do(order.outputs_have_gradients(entry, 7))
    said += memory.do(order.inputs_have_gradients(entry, 7))
    said += memory.do(order.outputs_have_gradients(entry, UNWATCHED))
    assert not any(one.startswith(("reduce", "release")) for one in said)
    said = memory.do(order.gradient_arrives(entry, "w"))
    said += memory.do(order.gradient_arrives(entry, "b"))
    assert said == ["collect 0", "collect 0", "release 0", "reduce 0"]


def test_a_unit_that_lends_a_parameter_stays_until_its_borrower_is_through():
    """Its own gradients are complete, but autograd is inside the unit that uses its weight."""
    order, memory, (owner, borrower, root) = make("owner", "borrower", "root")
    borrower.borrowed.append(owner)
    owner.borrowers.add(borrower)
    forward(order, memory, [owner, borrower, root])
    owner.end_call(owner.number + 1)  # its input needs no gradient, as an embedding's
    owner.begin_call(UNWATCHED)
    memory.do(order.backward_begins())
    memory.do(order.outputs_have_gradients(borrower, borrower.number + 1))
    for member in ("w", "b"):
        said = memory.do(order.gradient_arrives(owner, member))
        assert said == ["collect owner"]
    memory.do(order.gradient_arrives(borrower, "w"))
    assert owner.state is borrower.state is State.WHOLE
    memory.do(order.gradient_arrives(borrower, "b"))
    memory.do(order.inputs_have_gradients(borrower, borrower.number + 1))
    assert borrower.state is State.SHARDED


def test_a_borrower_that_is_gone_through_again_keeps_its_owner_once_more():
    """A reentrant checkpoint around a frozen borrower that contains the owner, used twice."""
    order, memory, (owner, borrower, root) = make("owner", "borrower", "root")
    owner.facts.members = {"b"}
    borrower.facts.members, borrower.facts.has_frozen = set(), True
    borrower.borrowed.append(owner)
    owner.borrowers.add(borrower)
    memory.do(order.forward_begins(root, records=True, trains=True))
    for _ in range(2):  # without a graph: there are no calls before they are computed again
        memory.do(order.forward_begins(borrower, records=False, trains=True))
        memory.do(order.forward_begins(owner, records=False, trains=True))
        memory.do(order.forward_ends(owner, has_graph=False))
        memory.do(order.forward_ends(borrower, has_graph=False))
    memory.do(order.forward_ends(root, has_graph=True))
    memory.do(order.backward_begins())
    for use in range(2):
        memory.do(order.outputs_have_gradients(borrower, 10 + use))
        memory.do(order.outputs_have_gradients(owner, 20 + use))
        memory.do(order.inputs_have_gradients(owner, 20 + use))
        assert owner.state is State.WHOLE, "the borrower's use of it is still to come"
        memory.do(order.gradient_arrives(owner, "b"))
        memory.do(order.inputs_have_gradients(borrower, 10 + use))
        assert owner.state is borrower.state is State.SHARDED
    assert memory.reduced == [owner, owner]


def test_a_second_backward_over_a_kept_graph_holds_units_until_their_inputs_are_reached():
    order, memory, entries = make("0", "1", "root")
    entries[-1].outer = True
    forward(order, memory, entries)
    backward(order, memory, entries)
    memory.do(order.backward_begins())
    memory.do(order.outputs_have_gradients(entries[1], entries[1].number + 1))
    for member in ("w", "b"):
        memory.do(order.gradient_arrives(entries[1], member))
    assert entries[1].state is State.WHOLE
    memory.do(order.inputs_have_gradients(entries[1], entries[1].number + 1))
    assert entries[1].state is State.SHARDED
    memory.do(order.backward_ends())
    said = memory.do(order.backward_completes())
    assert said == ["Trim"]
    assert [entry.name for entry in memory.reduced] == ["1", "0", "root", "1"]


def test_a_prefetch_that_no_forward_asked_for_is_released_after_an_evaluation():
    order, memory, entries = make("0", "1", "2", "root")
    entries[-1].outer = True
    forward(order, memory, entries)
    backward(order, memory, entries)
    memory.do(order.forward_begins(entries[-1], records=False, trains=False))
    memory.do(order.forward_begins(entries[0], records=False, trains=False))
    memory.do(order.forward_ends(entries[0], has_graph=False))
    memory.do(order.forward_ends(entries[-1], has_graph=False))  # 1 and 2 were skipped
    assert all(entry.state is State.SHARDED for entry in entries)


def test_the_order_imports_neither_torch_nor_anything_that_acts():
    for path in Path(order_module.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [one.name for one in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [node.module]
            assert not any(name.startswith("torch") for name in names), path
            own = [name for name in names if name.startswith("echelon")]
            assert all(name.startswith("echelon.dist.fsdp.order") for name in own), path


# ---- several models ----


def two_models():
    """Return an order, its memory, and a generator and a critic of two units and a root each."""
    order, memory, entries = make("g0", "g1", "G", "d0", "d1", "D")
    for root in (entries[2], entries[5]):
        root.outer = True
    return order, memory, entries[:3], entries[3:]


def test_a_step_of_the_critic_neither_gathers_nor_reduces_the_generator():
    order, memory, generator, critic = two_models()
    for step in range(3):
        forward(order, memory, generator)
        forward(order, memory, critic)
        said = back_through(order, memory, [critic], lambda words: words)
        assert not [one for one in said if one.startswith(("gather g", "gather G"))]
        assert [one for one in said if one.startswith("reduce")] == [
            "reduce d1", "reduce d0", "reduce D",
        ]  # fmt: skip
        assert said.index("reduce d1") < said.index("wait d0")
        forward(order, memory, critic)  # the generator's step goes through both
        said = back_through(order, memory, [critic, generator], lambda words: words)
        assert [one for one in said if one.startswith("reduce")] == [
            "reduce d1", "reduce d0", "reduce D", "reduce g1", "reduce g0", "reduce G",
        ]  # fmt: skip
        assert all(entry.state is State.SHARDED for entry in order.entries), step


def test_a_model_that_another_rank_reached_takes_part_with_zeros():
    order, memory, generator, critic = two_models()
    forward(order, memory, generator)
    forward(order, memory, critic)
    said = back_through(order, memory, [critic], lambda _: [1, 1])
    assert [one for one in said if one.startswith("gather g")] == ["gather g1", "gather g0"]
    assert [one for one in said if one.startswith("reduce")][-3:] == [
        "reduce g1", "reduce g0", "reduce G",
    ]  # fmt: skip


def test_a_model_that_another_rank_has_deleted_is_left_alone_for_good():
    order, memory, generator, critic = two_models()
    forward(order, memory, generator)
    for agreed in ([2, 1], []):
        forward(order, memory, critic)
        said = back_through(order, memory, [critic], lambda _, agreed=agreed: agreed)
        assert [one for one in said if one.startswith("reduce")] == [
            "reduce d1", "reduce d0", "reduce D",
        ]  # fmt: skip
    assert not order._pending.recordings()


def test_a_deleted_model_leaves_its_number_until_the_ranks_agree():
    order, memory, generator, critic = two_models()
    forward(order, memory, generator)
    forward(order, memory, critic)
    while generator:
        memory.state.pop(generator.pop())
    gc.collect()
    assert [entry.name for entry in order.entries] == ["d0", "d1", "D"]
    asked = []
    back_through(order, memory, [critic], lambda words: asked.append(words) or words)
    forward(order, memory, critic)
    back_through(order, memory, [critic], lambda words: asked.append(words) or words)
    assert asked == [[2, 1], []]


def back_through(order, memory, models, agree):
    """Run a backward through models, the last first; `agree` says what the ranks agree on."""
    said = memory.do(order.backward_begins())
    for *inner, root in models:
        said += memory.do(order.outputs_have_gradients(root, UNWATCHED))
        for entry in reversed(inner):
            said += memory.do(order.outputs_have_gradients(entry, entry.number + 1))
            for member in ("w", "b"):
                said += memory.do(order.gradient_arrives(entry, member))
            said += memory.do(order.inputs_have_gradients(entry, entry.number + 1))
        for member in ("w", "b"):
            said += memory.do(order.gradient_arrives(root, member))
    said += memory.do(order.backward_ends(agree(order.backward_asks()) or ()))
    return said + memory.do(order.backward_completes())


# ---- random programs ----


class Program:
    """A random tree of units and random steps through it, as autograd would report them."""

    def __init__(self, seed):
        self.draw = draw = random.Random(seed)
        self.order = Order(Budget(draw.choice([None, None, 0, 500, 5000])))
        self.memory = Memory(self.order)
        self.entries = []
        self.roots = [self._tree(2) for _ in range(draw.choice([1, 1, 2]))]
        self.order.budget.measure(self.order.entries)
        self._borrow()
        self.calls = 0

    def _tree(self, depth):
        draw = self.draw
        children = [self._tree(depth - 1) for _ in range(draw.randint(0, 4) if depth else 0)]
        members = {f"p{i}" for i in range(draw.choice([0, 1, 2, 3]))}
        entry = Entry(
            number=len(self.order.entries),
            name=str(len(self.order.entries)),
            facts=Facts(members, frozen=draw.random() < 0.2 or not members),
            num_bytes=draw.choice([50, 100, 400]),
            gradient_bytes=draw.choice([50, 100, 400]),
            depth=draw.choice([0, 1, 2, 5]),
            reshard=draw.random() < 0.8,
            has_near=draw.random() < 0.2,
            outer=bool(children),
        )
        self.order.add(entry)
        self.entries.append(entry)
        return entry, children

    def _borrow(self):
        for entry in self.order.entries:
            owners = self.order.entries[: entry.number]
            if owners and self.draw.random() < 0.15:
                owner = self.draw.choice(owners)
                if not self._contains(entry, owner):
                    entry.borrowed.append(owner)
                    owner.borrowers.add(entry)

    def _contains(self, entry, other):
        return any(
            node[0] is entry and other in [one[0] for one in walk(node)]
            for root in self.roots
            for node in walk(root)
        )

    # ---- forward ----

    def forward(self, node, records, tape):
        entry, children = node
        self.memory.do(self.order.forward_begins(entry, records=records, trains=records))
        self._used(entry)
        call = UNWATCHED
        if records:
            self.calls += 1
            call = self.calls if self.draw.random() < 0.8 else UNWATCHED
            entry.begin_call(call)
        inner = []
        for child in children:
            if self.draw.random() < 0.9:
                self.forward(child, records, inner)
                self._used(entry)
        tape.append((entry, call, inner))
        self.memory.do(self.order.forward_ends(entry, has_graph=records))
        self._bounded()

    # ---- backward ----

    def backward(self, tapes):
        self.left = {}
        for tape in tapes:
            for entry, _, _ in walk_tape(tape):
                for member in entry.facts.members:
                    key = (entry, member)
                    self.left[key] = self.left.get(key, 0) + 1
        entered = self.memory.do(self.order.backward_begins())
        assert isinstance(entered, list)
        for tape in reversed(tapes):
            self._back(tape)
        # What a rank did not use has no gradient; the run ends with what there is.
        self.memory.do(self.order.backward_ends())
        if self.order.in_backward:
            self.memory.do(self.order.backward_completes())
        self._bounded()

    def _back(self, tape):
        for entry, call, inner in reversed(tape):
            self.memory.do(self.order.outputs_have_gradients(entry, call))
            self._used(entry)
            self._back(inner)
            self._used(entry)
            for member in sorted(entry.facts.members):
                self.left[entry, member] -= 1
                if not self.left[entry, member]:  # autograd accumulates a leaf's uses
                    self.memory.do(self.order.gradient_arrives(entry, member))
            if call != UNWATCHED:
                self.memory.do(self.order.inputs_have_gradients(entry, call))

    # ---- what must hold ----

    def _used(self, entry):
        for one in (entry, *entry.borrowed):
            assert self.memory.state[one] is State.WHOLE, (entry, one)

    def _bounded(self):
        ahead = [entry for entry in self.order._residency._ahead if entry.state is State.GATHERING]
        if len(ahead) > 1:
            assert sum(entry.num_bytes for entry in ahead) <= self.order.budget.third
        if len(self.memory.reducing) > 2:
            sizes = [entry.gradient_bytes for entry in self.memory.reducing]
            assert sum(sizes) <= self.order.budget.third


def walk(node):
    yield node
    for child in node[1]:
        yield from walk(child)


def walk_tape(tape):
    for entry, call, inner in tape:
        yield entry, call, inner
        yield from walk_tape(inner)


def run_step(program):
    """Run one step of a random kind; check what must hold after it."""
    draw, order, memory = program.draw, program.order, program.memory
    for entry in order.entries:
        entry.sync = True
    kind = draw.choice(["train", "train", "train", "evaluate", "fail", "accumulate", "hold", "two"])
    root = draw.choice(program.roots)
    memory.reduced.clear()
    if kind == "evaluate":
        program.forward(root, False, [])
        return kind
    if kind == "hold":
        units = [node[0] for node in walk(root)]
        memory.do(order.gather(units))
        memory.do(order.hold(units))
        program.forward(root, False, [])
        assert all(memory.state[entry] is State.WHOLE for entry in units)
        memory.do(order.reduce([entry for entry in units if entry.facts.trains]))
        memory.do(order.release(units))
        return kind
    tapes = [[] for _ in range(2 if kind == "two" else 1)]
    for tape in tapes:
        program.forward(root, True, tape)
    if kind == "fail":
        if draw.random() < 0.5:
            memory.do(order.backward_begins())
            memory.do(order.outputs_have_gradients(tapes[0][-1][0], tapes[0][-1][1]))
        order.fail()
        program.forward(root, False, [])  # starts over
        return kind
    if kind == "accumulate":
        for entry in order.entries:
            entry.sync = False
    waiting = {entry for entry in order.entries if entry.facts.waiting}
    program.backward(tapes)
    used = {entry for tape in tapes for entry, _, _ in walk_tape(tape) if entry.facts.trains}
    if kind == "accumulate":
        assert not memory.reduced
    elif any(entry.facts.members for entry in used):
        counts = {entry: memory.reduced.count(entry) for entry in memory.reduced}
        assert set(counts) >= used | waiting
        assert not any(memory.collected.values())  # whatever was collected was reduced
        assert len(memory.reduced) == len(counts) or any(e.borrowed for e in order.entries)
    if kind != "fail":
        assert all(entry.state is State.SHARDED for entry in order.entries)
    return kind


@pytest.mark.parametrize("first", range(0, 160, 40))
def test_random_programs_never_use_what_is_released_and_release_all_they_gathered(first):
    kinds = set()
    for seed in range(first, first + 40):
        program = Program(seed)
        for _ in range(8):
            kinds.add(run_step(program))
    assert len(kinds) == 6
