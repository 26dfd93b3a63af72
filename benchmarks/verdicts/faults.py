"""The families of cases: what goes wrong in a job, and what a diagnosis should say of it.

A family changes the programs of some ranks at one place and states the truth. What an analyzer may
answer is stated per case: sets of ranks that are right, and causes that are acceptable, the first
of them being the best. A case is decidable if the records can single the ranks out; that is
computed from the finished run, not from what any analyzer says.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from random import Random

from engine import NEVER, Call, Die, Engine, Hang, Host, Instruction, Kernel, Launch, Part
from layouts import RANKS_PER_HOST
from programs import PROGRAMS, Shape, Step

Programs = list[list[Step]]  # rank, step, instruction
NCCL = tuple(name for name, one in PROGRAMS.items() if one.backend == "nccl")
ALL = tuple(PROGRAMS)
PIPELINES = ("megatron", "pp_dp", "gpipe")
BATCHED = ("megatron", "pp_dp", "ring_attention")
COLLECTIVE = ("ddp", "fsdp2", "hsdp", "tp_dp", "gloo_ddp")
SUBGROUPS = ("hsdp", "tp_dp", "megatron", "moe", "ulysses")


@dataclass(frozen=True, kw_only=True)
class Truth:
    """What happened.

    Attributes:
        causes: acceptable ones, the best first; ("healthy",) if nothing is wrong.
        culprits: acceptable sets of ranks, the best first.
        lost: ranks that left no dump.
        decidable: None: computed from the run.
    """

    causes: tuple[str, ...]
    culprits: tuple[tuple[int, ...], ...]
    lost: tuple[int, ...] = ()
    decidable: bool | None = None
    note: str = ""


@dataclass(kw_only=True)
class Scene:
    """A job that a family may change before it runs."""

    random: Random
    shape: Shape
    program: str
    programs: Programs
    steps: int
    cut_pairs: frozenset[frozenset[int]] = frozenset()
    cut_at: float = NEVER
    wants: dict[str, object] = field(default_factory=dict)  # what the dumps must be like

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.shape.layout.world_size

    def rank(self) -> int:
        """Draw a rank."""
        return self.random.randrange(self.world_size)

    def step(self) -> int:
        """Draw a step that has two of its kind before it."""
        return self.random.randint(2, self.steps - 2)

    def calls(self, rank: int, step: int, which: Callable[[Call], bool] | None = None) -> list[int]:
        """Return where a step of a rank has calls."""
        return [
            index
            for index, one in enumerate(self.programs[rank][step])
            if isinstance(one, Call) and (which is None or which(one))
        ]

    def change(self, rank: int, step: int, index: int, *new: Instruction) -> None:
        """Replace one instruction of a rank by others."""
        old = self.programs[rank][step]
        self.programs[rank][step] = [*old[:index], *new, *old[index + 1 :]]

    def call(self, rank: int, step: int, index: int) -> Call:
        """Return the call at a place."""
        found = self.programs[rank][step][index]
        assert isinstance(found, Call), found
        return found


Fault = Callable[[Scene], Truth]


@dataclass(frozen=True, slots=True)
class Family:
    """A kind of case, and the programs in which it can be shown."""

    name: str
    make: Fault
    programs: tuple[str, ...]


# ---- health ----


_HEALTHY = Truth(causes=("healthy",), culprits=((),))


def _healthy_end(scene: Scene) -> Truth:
    scene.wants["moment"] = "end"
    return _HEALTHY


def _healthy_in_flight(scene: Scene) -> Truth:
    scene.wants["moment"] = "flight"
    return _HEALTHY


def _healthy_active_only(scene: Scene) -> Truth:
    scene.wants.update(moment="flight", only_active=True)
    return _HEALTHY


def _healthy_wrapped(scene: Scene) -> Truth:
    scene.wants.update(moment=scene.random.choice(("flight", "end")), ring=24)
    return _HEALTHY


def _healthy_slow_rank(scene: Scene) -> Truth:
    """One rank's data is slow in every step: all wait for it, and the job moves."""
    slow = scene.rank()
    for step in scene.programs[slow]:
        step.insert(0, Host(6 * scene.shape.kernel_s))
    scene.wants["moment"] = "flight"
    return _HEALTHY


def _healthy_after_stall(scene: Scene) -> Truth:
    """A rank was stuck for half a minute some steps ago, and all went on."""
    scene.programs[scene.rank()][1].insert(0, Host(30.0))
    scene.wants["moment"] = scene.random.choice(("late_flight", "end"))
    return _HEALTHY


# ---- hosts ----


def _stop_before(scene: Scene, rank: int, step: int, stop: Instruction, **which: bool) -> Call:
    places = scene.calls(rank, step, lambda call: _is_small(scene, call) or not which.get("small"))
    index = scene.random.choice(places)
    call = scene.call(rank, step, index)
    scene.change(rank, step, index, stop, call)
    return call


def _is_small(scene: Scene, call: Call) -> bool:
    return len(call.group.ranks) < scene.world_size


def _host_hang(scene: Scene) -> Truth:
    rank = scene.rank()
    _stop_before(scene, rank, scene.step(), Hang())
    return Truth(causes=_HOST, culprits=((rank,),))


_HOST = ("host_hang", "data_starvation", "storage_stall", "compile_stall", "gil_hang", "unknown")


def _host_hang_subgroup(scene: Scene) -> Truth:
    rank = scene.rank()
    _stop_before(scene, rank, scene.step(), Hang(), small=True)
    return Truth(causes=_HOST, culprits=((rank,),))


def _host_hang_first_use(scene: Scene) -> Truth:
    """The rank hangs before its first operation of all."""
    rank = scene.rank()
    scene.programs[rank][0].insert(0, Hang())
    return Truth(causes=_HOST, culprits=((rank,),))


def _host_hang_data(scene: Scene) -> Truth:
    """The rank hangs where a step begins, in its loader."""
    rank = scene.rank()
    scene.programs[rank][scene.step()].insert(0, Hang())
    return Truth(causes=_HOST, culprits=((rank,),))


def _two_host_hangs(scene: Scene) -> Truth:
    ranks = sorted(scene.random.sample(range(scene.world_size), 2))
    step = scene.step()
    for rank in ranks:
        scene.programs[rank][step].insert(0, Hang())
    return Truth(causes=_HOST, culprits=(tuple(ranks),))


_DEAD = ("dead_process", "out_of_memory", "frozen_process", "host_hang")


def _dead_rank(scene: Scene) -> Truth:
    rank = scene.rank()
    _stop_before(scene, rank, scene.step(), Die())
    return Truth(causes=_DEAD, culprits=((rank,),), lost=(rank,))


def _dead_host(scene: Scene) -> Truth:
    """All ranks of one machine are gone in the same step."""
    hosts = scene.world_size // RANKS_PER_HOST
    if hosts < 2:
        return _dead_rank(scene)
    host = scene.random.randrange(hosts)
    ranks = tuple(range(host * RANKS_PER_HOST, (host + 1) * RANKS_PER_HOST))
    step = scene.step()
    for rank in ranks:
        scene.programs[rank][step].insert(0, Die())
    return Truth(causes=_DEAD, culprits=(ranks,), lost=ranks)


def _hang_and_lost_dump(scene: Scene) -> Truth:
    """One rank hangs; the dump of another, which only waits, was not written."""
    rank, lost = scene.random.sample(range(scene.world_size), 2)
    scene.programs[rank][scene.step()].insert(0, Hang())
    return Truth(causes=_HOST, culprits=((rank,), tuple(sorted((rank, lost)))), lost=(lost,))


# ---- devices and links ----


def _device_kernel(scene: Scene) -> Truth:
    """A compute kernel never ends: what comes after it on this device never starts."""
    rank, step = scene.rank(), scene.step()
    kernels = [i for i, one in enumerate(scene.programs[rank][step]) if isinstance(one, Kernel)]
    scene.change(rank, step, scene.random.choice(kernels), Kernel(NEVER))
    scene.wants["timing"] = True
    return Truth(causes=("device_stuck", "host_hang"), culprits=((rank,),), note="kernel")


def _device_unnoticed(scene: Scene) -> Truth:
    """The device stops in a collective after it has given its peers what they need."""
    rank, step = scene.rank(), scene.step()
    places = scene.calls(rank, step, lambda call: not call.parts and call.root < 0)
    index = scene.random.choice(places)
    scene.change(rank, step, index, replace(scene.call(rank, step, index), unnoticed=True))
    return Truth(causes=("device_stuck",), culprits=((rank,),))


def _network(scene: Scene) -> Truth:
    """No packet passes between two hosts any more: all are inside, and none completes."""
    random = scene.random
    per_host = max(1, min(RANKS_PER_HOST, scene.world_size // 2))
    a, b = random.sample(range(scene.world_size // per_host), 2)
    left = range(a * per_host, (a + 1) * per_host)
    right = range(b * per_host, (b + 1) * per_host)
    scene.cut_pairs = frozenset(frozenset((x, y)) for x in left for y in right)
    scene.wants["cut"] = True
    return Truth(
        causes=("network", "device_stuck", "unknown"),
        culprits=((), tuple(left), tuple(right), tuple(sorted((*left, *right)))),
    )


# ---- calls that differ ----


def _plain(call: Call) -> bool:
    return not call.parts and call.root < 0 and call.operation != "all_reduce_barrier"


def _with_majority(scene: Scene) -> tuple[int, int, int, Call]:
    rank, step = scene.rank(), scene.step()
    places = scene.calls(rank, step, _plain)
    voted = [i for i in places if len(scene.call(rank, step, i).group.ranks) > 2] or places
    index = scene.random.choice(voted)
    return rank, step, index, scene.call(rank, step, index)


def _odd_call(scene: Scene, cause: str, **changes: object) -> Truth:
    rank, step, index, call = _with_majority(scene)
    scene.change(rank, step, index, replace(call, **changes))  # type: ignore[arg-type]
    return Truth(causes=(cause,), culprits=((rank,),))


def _op_mismatch(scene: Scene) -> Truth:
    rank, step, index, call = _with_majority(scene)
    other = "all_gather" if call.operation != "all_gather" else "all_reduce"
    scene.change(rank, step, index, replace(call, operation=other, line=call.line + 3))
    return Truth(causes=("op_mismatch",), culprits=((rank,),))


def _shape_mismatch(scene: Scene) -> Truth:
    rank, step, index, call = _with_majority(scene)
    odd = replace(call, inputs=_grown(call.inputs), outputs=_grown(call.outputs))
    scene.change(rank, step, index, odd)
    return Truth(causes=("shape_mismatch", "split_mismatch"), culprits=((rank,),))


def _grown(sizes: Sequence[tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
    return tuple((size[0] * 2, *size[1:]) for size in sizes)


def _dtype_mismatch(scene: Scene) -> Truth:
    return _odd_call(scene, "dtype_mismatch", dtype="BFloat16")


def _all_alike(scene: Scene) -> Truth:
    """All ranks pass an output that does not fit their input."""
    rank, step = scene.rank(), scene.step()
    gathers = ("_all_gather_base", "_reduce_scatter_base")
    index = scene.random.choice(scene.calls(rank, step, lambda call: call.operation in gathers))
    group = scene.call(rank, step, index).group
    for member in group.ranks:
        call = scene.call(member, step, index)
        wrong = ((call.outputs[0][0] + 1,),)
        scene.change(member, step, index, replace(call, outputs=wrong, broken=True))
    return Truth(causes=("shape_mismatch",), culprits=(group.ranks, ()))


def _even_splits(scene: Scene) -> Truth:
    """One rank sends one token more to one peer than that peer expects."""
    rank, step = scene.rank(), scene.step()
    index = scene.random.choice(scene.calls(rank, step, lambda call: bool(call.sends)))
    call = scene.call(rank, step, index)
    sends = (call.sends[0] + 1, *call.sends[1:])
    odd = replace(call, sends=sends, inputs=((sum(sends), *call.inputs[0][1:]),))
    scene.change(rank, step, index, odd)
    return Truth(causes=("split_mismatch", "shape_mismatch"), culprits=((rank,),))


# ---- streams that differ ----

# With several groups, a rank that left a call out and waits in the next group cannot be told from
# one that makes the two calls in the other order.
_SLIP = ("skipped_collective", "op_mismatch", "shape_mismatch")
_SLIP_OR_ORDER = (*_SLIP, "order_desync")


def _slip_causes(scene: Scene) -> tuple[str, ...]:
    return _SLIP_OR_ORDER if len(scene.shape.layout.axes) > 1 else _SLIP


def _skipped(scene: Scene) -> Truth:
    rank, step, index, _ = _with_majority(scene)
    call = scene.call(rank, step, index)
    rest = [one for one in scene.programs[rank][step] if one is not call]
    waits = [one for one in rest if getattr(one, "tag", None) != call.tag or not call.tag]
    scene.programs[rank][step] = waits
    return Truth(causes=_slip_causes(scene), culprits=((rank,),))


def _extra(scene: Scene) -> Truth:
    rank, step, index, call = _with_majority(scene)
    again = replace(call, tag="", line=call.line + 5, function="evaluate", blocking=True)
    scene.change(rank, step, index, call, again)
    return Truth(causes=_slip_causes(scene), culprits=((rank,),))


def _uneven_inputs(scene: Scene) -> Truth:
    """One rank has fewer batches: it leaves the loop and goes to the final barrier."""
    rank, step = scene.rank(), scene.step()
    world = scene.shape.layout.group("world", rank)
    scene.programs[rank][step:] = [
        [
            Call(
                group=world,
                operation="all_reduce_barrier",
                inputs=((1,),),
                outputs=((1,),),
                line=200,
                function="main",
            )
        ]
    ]
    causes = ("skipped_collective", "op_mismatch", "order_desync", "host_hang", "shape_mismatch")
    return Truth(causes=causes, culprits=((rank,),))


def _order_desync(scene: Scene) -> Truth:
    """One rank calls two neighbouring operations of different groups in the other order."""
    random = scene.random
    step = scene.step()
    rank = scene.rank()
    places = [
        (i, j)
        for i, j in _neighbours(scene.calls(rank, step, _plain))
        if scene.call(rank, step, i).group != scene.call(rank, step, j).group
    ]
    first, second = random.choice(places)
    a, b = scene.call(rank, step, first), scene.call(rank, step, second)
    peer = next(r for r in a.group.ranks if r != rank)
    program = scene.programs[rank][step]
    program[first], program[second] = replace(b, blocking=True), replace(a, blocking=True)
    _block(scene, step, first, second)
    shared = set(a.group.ranks) & set(b.group.ranks)
    both = tuple(sorted(shared))
    return Truth(
        causes=("order_desync",),
        culprits=((rank,), both, tuple(sorted({*a.group.ranks, *b.group.ranks}))),
        note=f"rank {rank} against {peer}",
    )


def _neighbours(places: Sequence[int]) -> list[tuple[int, int]]:
    return list(pairwise(places))


def _block(scene: Scene, step: int, *indices: int) -> None:
    """Let the calls at some places block on all ranks, so that their order matters."""
    for steps in scene.programs:
        for index in indices:
            one = steps[step][index]
            if isinstance(one, Call):
                steps[step][index] = replace(one, blocking=True)


# ---- messages ----


def _p2p_place(scene: Scene) -> tuple[int, int, int, Call]:
    rank, step = scene.rank(), scene.step()
    index = scene.random.choice(scene.calls(rank, step, lambda call: bool(call.parts)))
    return rank, step, index, scene.call(rank, step, index)


def _with_parts(call: Call, parts: Sequence[Part]) -> Call:
    return replace(call, parts=tuple(parts))


_UNMATCHED = ("p2p_unmatched", "skipped_collective", "host_hang", "order_desync")


def _p2p_missing(scene: Scene) -> Truth:
    """One rank leaves one message out and goes on."""
    rank, step, index, call = _p2p_place(scene)
    gone = scene.random.randrange(len(call.parts))
    peer = call.parts[gone].peer
    left = [part for place, part in enumerate(call.parts) if place != gone]
    scene.change(rank, step, index, *([_with_parts(call, left)] if left else [Host(1e-5)]))
    return Truth(causes=_UNMATCHED, culprits=((rank,), tuple(sorted((rank, peer)))))


def _p2p_wrong_peer(scene: Scene) -> Truth:
    """One rank sends to, or receives from, a rank that expects nothing of it."""
    rank, step, index, call = _p2p_place(scene)
    wrong = scene.random.randrange(len(call.parts))
    part = call.parts[wrong]
    strangers = [r for r in call.group.ranks if r not in (rank, part.peer)]
    odd = replace(part, peer=scene.random.choice(strangers))
    parts = [odd if place == wrong else one for place, one in enumerate(call.parts)]
    scene.change(rank, step, index, _with_parts(call, parts))
    pair = tuple(sorted((rank, part.peer)))
    return Truth(causes=_UNMATCHED, culprits=((rank,), pair))


def _p2p_size(scene: Scene) -> Truth:
    """One message of a batch has another size than the other side expects."""
    return _odd_part(scene, "shape_mismatch", sizes=(64, 16))


def _p2p_dtype(scene: Scene) -> Truth:
    """One message of a batch has another dtype than the other side expects."""
    return _odd_part(scene, "dtype_mismatch", dtype="Half")


def _odd_part(scene: Scene, cause: str, **changes: object) -> Truth:
    rank, step, index, call = _p2p_place(scene)
    wrong = scene.random.randrange(len(call.parts))
    peer = call.parts[wrong].peer
    odd = replace(call.parts[wrong], **changes)  # type: ignore[arg-type]
    parts = [odd if place == wrong else one for place, one in enumerate(call.parts)]
    scene.change(rank, step, index, _with_parts(call, parts))
    return Truth(causes=(cause,), culprits=((rank,), tuple(sorted((rank, peer)))))


FAMILIES: tuple[Family, ...] = (
    Family("healthy_end", _healthy_end, ALL),
    Family("healthy_in_flight", _healthy_in_flight, ALL),
    Family("healthy_active_only", _healthy_active_only, NCCL),
    Family("healthy_wrapped_ring", _healthy_wrapped, ALL),
    Family("healthy_slow_rank", _healthy_slow_rank, NCCL),
    Family("healthy_after_stall", _healthy_after_stall, NCCL),
    Family("host_hang", _host_hang, ALL),
    Family("host_hang_subgroup", _host_hang_subgroup, SUBGROUPS),
    Family("host_hang_first_use", _host_hang_first_use, ALL),
    Family("host_hang_data", _host_hang_data, ALL),
    Family("two_host_hangs", _two_host_hangs, COLLECTIVE),
    Family("dead_rank", _dead_rank, ALL),
    Family("dead_host", _dead_host, NCCL),
    Family("hang_and_lost_dump", _hang_and_lost_dump, COLLECTIVE),
    Family("device_kernel", _device_kernel, NCCL),
    Family("device_unnoticed", _device_unnoticed, NCCL),
    Family("network", _network, ("ddp", "fsdp2", "tp_dp", "hsdp", "gloo_ddp")),
    Family("op_mismatch", _op_mismatch, COLLECTIVE),
    Family("shape_mismatch", _shape_mismatch, COLLECTIVE),
    Family("dtype_mismatch", _dtype_mismatch, COLLECTIVE),
    Family("all_wrong_alike", _all_alike, ("fsdp2", "hsdp")),
    Family("split_mismatch", _even_splits, ("ulysses",)),
    Family("skipped_collective", _skipped, COLLECTIVE),
    Family("extra_collective", _extra, COLLECTIVE),
    Family("uneven_inputs", _uneven_inputs, ("ddp", "fsdp2", "gloo_ddp")),
    Family("order_desync", _order_desync, ("tp_dp", "hsdp")),
    Family("p2p_missing", _p2p_missing, PIPELINES),
    Family("p2p_wrong_peer", _p2p_wrong_peer, ("pp_dp", "gpipe", "ring_attention")),
    Family("p2p_size", _p2p_size, (*BATCHED, "gpipe")),
    Family("p2p_dtype", _p2p_dtype, (*BATCHED, "gpipe")),
)


def is_decidable(truth: Truth, engine: Engine) -> bool:
    """Tell whether the end of a run can single out the ranks.

    A rank whose host stopped must have nothing pending, or its absence looks like a wait; and some
    other rank must wait for it.
    """
    if truth.decidable is not None:
        return truth.decidable
    if truth.causes[0] == "healthy":
        return True
    pending = {
        one.rank for rank in engine.ranks for one in rank.launches if one.ended is None
    } - set(truth.lost)
    if not pending:
        return False
    if truth.causes[0] == "host_hang":
        return not pending.intersection(truth.culprits[0])
    if truth.note == "kernel":
        return _is_alone_unstarted(engine, truth.culprits[0][0])
    if truth.causes[0] == "device_stuck":
        return _is_behind(engine, truth.culprits[0][0])
    return True


def _is_alone_unstarted(engine: Engine, culprit: int) -> bool:
    """Tell whether all others started an operation at whose head the culprit has not."""
    heads = [one for one in engine.ranks[culprit].launches if one.ended is None]
    for head in heads[:1]:
        if head.started is not None or head.call.parts:
            return False
        others = [
            next((o for o in engine.ranks[r].launches if _same(o, head)), None)
            for r in head.call.group.ranks
            if r != culprit
        ]
        return all(one is not None and one.started is not None for one in others)
    return False


def _is_behind(engine: Engine, culprit: int) -> bool:
    for head in engine.ranks[culprit].launches:
        if head.ended is None and not head.call.parts:
            peers = [r for r in head.call.group.ranks if r != culprit]
            return any(
                _same(one, head) and one.ended is not None
                for peer in peers
                for one in engine.ranks[peer].launches
            )
    return False


def _same(one: Launch, other: Launch) -> bool:
    return (
        not one.call.parts
        and one.call.group == other.call.group
        and one.collective_seq == other.collective_seq
    )
