"""Training programs: the operations that each rank's host enqueues in each step.

A program is a list of steps, and a step is a list of instructions, built by the same function for
all ranks. Shapes are arbitrary; the order and the dependencies are those of the named kind of
training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random

from benchmarks.verdicts.engine import Call, Host, Instruction, Kernel, Part, Sync, Wait
from benchmarks.verdicts.layouts import Layout, mesh

Step = list[Instruction]
StepMaker = Callable[["Shape", int, int], Step]


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """The random parameters of one job, drawn once for all its ranks."""

    layout: Layout
    layers: int
    microbatches: int
    kernel_s: float
    data_s: float
    syncs: bool  # the host reads the loss in each step
    extra_every: int  # steps between evaluations or checkpoints; 0: none


@dataclass(frozen=True, slots=True)
class Program:
    """A kind of job.

    Attributes:
        axes: world size -> mesh axes, for the supported world sizes.
        backend: "nccl" or "gloo"; with Gloo, the host itself waits in every operation.
    """

    name: str
    axes: Callable[[int], tuple[tuple[str, int], ...]]
    step: StepMaker
    backend: str = "nccl"


def _call(shape: Shape, axis: str, rank: int, operation: str, numel: int, **how: object) -> Call:
    group = shape.layout.group(axis, rank)
    size = len(group.ranks)
    inputs, outputs = (numel,), (numel,)
    if operation in ("_all_gather_base", "all_gather_into_tensor"):
        outputs = (numel * size,)
    elif operation in ("_reduce_scatter_base", "reduce_scatter_tensor"):
        inputs = (numel * size,)
    return Call(group=group, operation=operation, inputs=(inputs,), outputs=(outputs,), **how)  # type: ignore[arg-type]


def _data(shape: Shape) -> Iterator[Instruction]:
    yield Host(shape.data_s)


def _loss(shape: Shape, rank: int) -> Iterator[Instruction]:
    yield _call(shape, "world", rank, "all_reduce", 1, line=90, function="log_loss")
    if shape.syncs:
        yield Sync()


def _extra(shape: Shape, rank: int, step: int) -> Iterator[Instruction]:
    """Occasionally evaluate and save: rank 0 writes, and the others wait in a barrier."""
    if not shape.extra_every or step % shape.extra_every != shape.extra_every - 1:
        return
    world = shape.layout.group("world", rank)
    yield Kernel(shape.kernel_s)
    yield _call(shape, "world", rank, "reduce", 16, line=120, function="evaluate", root=0)
    yield Sync()
    if rank == 0:
        yield Host(8 * shape.kernel_s)
    yield Call(
        group=world,
        operation="broadcast",
        inputs=((32,),),
        outputs=((32,),),
        root=0,
        line=131,
        function="save_checkpoint",
    )
    yield _call(shape, "world", rank, "all_reduce_barrier", 1, line=133, function="save_checkpoint")
    yield Sync()


def _ddp(shape: Shape, rank: int, step: int) -> Step:
    out: Step = [*_data(shape), Kernel(shape.kernel_s * 2)]
    for bucket in range(shape.layers):
        out.append(Kernel(shape.kernel_s))
        numel = 1000 + 100 * bucket
        tag = f"b{bucket}"
        out.append(_call(shape, "dp", rank, "all_reduce", numel, blocking=False, tag=tag, line=40))
    out += [Wait(f"b{bucket}") for bucket in range(shape.layers)]
    return [*out, Kernel(shape.kernel_s), *_loss(shape, rank), *_extra(shape, rank, step)]


def _fsdp_layers(shape: Shape, rank: int, axis: str) -> Step:
    def gather(layer: int, tag: str, line: int) -> Call:
        numel = 512 + 8 * layer
        return _call(
            shape,
            axis,
            rank,
            "_all_gather_base",
            numel,
            blocking=False,
            after_compute=False,
            tag=tag,
            line=line,
            function="unshard",
        )

    out: Step = [gather(0, "f0", 210)]
    for layer in range(shape.layers):
        if layer + 1 < shape.layers:
            out.append(gather(layer + 1, f"f{layer + 1}", 210))
        out += [Wait(f"f{layer}"), Kernel(shape.kernel_s)]
    last = shape.layers - 1
    out.append(gather(last, f"r{last}", 214))
    for layer in range(last, -1, -1):
        if layer:
            out.append(gather(layer - 1, f"r{layer - 1}", 214))
        out += [Wait(f"r{layer}"), Kernel(shape.kernel_s * 2)]
        out.append(
            _call(
                shape,
                axis,
                rank,
                "_reduce_scatter_base",
                512 + 8 * layer,
                blocking=False,
                tag=f"s{layer}",
                line=230,
                function="post_backward",
            )
        )
    return out


def _fsdp2(shape: Shape, rank: int, step: int) -> Step:
    out = [*_data(shape), *_fsdp_layers(shape, rank, "dp")]
    out += [Wait(f"s{layer}") for layer in range(shape.layers)]
    return [*out, Kernel(shape.kernel_s), *_loss(shape, rank), *_extra(shape, rank, step)]


def _hsdp(shape: Shape, rank: int, step: int) -> Step:
    out: Step = [*_data(shape)]
    for one in _fsdp_layers(shape, rank, "shard"):
        out.append(one)
        if isinstance(one, Call) and one.operation == "_reduce_scatter_base":
            numel = one.outputs[0][0]
            tag = f"a{one.tag}"
            out.append(Wait(one.tag))
            out.append(
                _call(
                    shape,
                    "replicate",
                    rank,
                    "all_reduce",
                    numel,
                    blocking=False,
                    tag=tag,
                    line=240,
                    function="post_backward",
                )
            )
    out += [Wait(f"as{layer}") for layer in range(shape.layers)]
    return [*out, Kernel(shape.kernel_s), *_loss(shape, rank), *_extra(shape, rank, step)]


def _tp_layers(shape: Shape, rank: int, lines: tuple[int, int]) -> Step:
    out: Step = []
    for layer in range(shape.layers):
        out.append(Kernel(shape.kernel_s))
        numel = 2048 + 16 * layer
        line = lines[layer % 2]
        out.append(_call(shape, "tp", rank, "all_reduce", numel, line=line, function="forward"))
    return out


def _tp_dp(shape: Shape, rank: int, step: int) -> Step:
    out = [
        *_data(shape),
        *_tp_layers(shape, rank, (310, 312)),
        *_tp_layers(shape, rank, (320, 322)),
    ]
    for bucket in range(2):
        out.append(
            _call(
                shape,
                "dp",
                rank,
                "all_reduce",
                4000 + bucket,
                blocking=False,
                tag=f"d{bucket}",
                line=330,
                function="reduce_gradients",
            )
        )
    out += [Wait("d0"), Wait("d1"), Kernel(shape.kernel_s)]
    return [*out, *_loss(shape, rank), *_extra(shape, rank, step)]


def _exchange(
    shape: Shape, rank: int, parts: list[tuple[str, int]], line: int, **how: object
) -> Step:
    """Exchange messages with neighboring stages, in one batch or one after another."""
    group = shape.layout.group("pp", rank)
    place = group.ranks.index(rank)
    found = [
        Part(way, group.ranks[place + offset], (64, 8))
        for way, offset in parts
        if 0 <= place + offset < len(group.ranks)
    ]
    if not found:
        return []
    return [Call(group=group, parts=tuple(found), batched=True, line=line, **how)]  # type: ignore[arg-type]


def _1f1b(shape: Shape, rank: int, forward: Step, backward: Step) -> Step:
    stage = shape.layout.coordinate("pp", rank)
    stages = dict(shape.layout.axes)["pp"]
    warmup = min(stages - stage - 1, shape.microbatches)
    steady = shape.microbatches - warmup
    receive_forward, send_forward = [("recv", -1)], [("send", 1)]
    receive_backward, send_backward = [("recv", 1)], [("send", -1)]
    out: Step = []
    for _ in range(warmup):
        out += _exchange(shape, rank, receive_forward, 410, function="recv_forward")
        out += forward
        out += _exchange(shape, rank, send_forward, 412, function="send_forward")
    if steady:
        out += _exchange(shape, rank, receive_forward, 410, function="recv_forward")
    for index in range(steady):
        out += forward
        out += _exchange(shape, rank, send_forward + receive_backward, 420, function="send_recv")
        out += backward
        both = send_backward if index == steady - 1 else send_backward + receive_forward
        out += _exchange(shape, rank, both, 424, function="send_recv")
    for _ in range(warmup):
        out += _exchange(shape, rank, receive_backward, 430, function="recv_backward")
        out += backward
        out += _exchange(shape, rank, send_backward, 432, function="send_backward")
    return out


def _megatron(shape: Shape, rank: int, step: int) -> Step:
    forward = _tp_layers(shape, rank, (310, 312))
    backward = _tp_layers(shape, rank, (320, 322))
    out = [*_data(shape), *_1f1b(shape, rank, forward, backward)]
    out.append(
        _call(shape, "dp", rank, "_reduce_scatter_base", 4000, line=440, function="finish_grads")
    )
    out += [Kernel(shape.kernel_s)]
    out.append(_call(shape, "dp", rank, "_all_gather_base", 4000, line=444, function="optimizer"))
    return [*out, *_loss(shape, rank), *_extra(shape, rank, step)]


def _pp_dp(shape: Shape, rank: int, step: int) -> Step:
    kernel: Step = [Kernel(shape.kernel_s)]
    out = [*_data(shape), *_1f1b(shape, rank, kernel, kernel)]
    out.append(_call(shape, "dp", rank, "all_reduce", 5000, line=440, function="finish_grads"))
    return [*out, *_loss(shape, rank), *_extra(shape, rank, step)]


def _gpipe(shape: Shape, rank: int, step: int) -> Step:
    """Run all forwards, then all backwards, with plain sends and receives per pair."""
    group = shape.layout.group("pp", rank)
    place = group.ranks.index(rank)

    def message(way: str, offset: int, line: int) -> Step:
        if not 0 <= place + offset < len(group.ranks):
            return []
        part = Part(way, group.ranks[place + offset], (64, 8))
        blocking = way == "recv"
        return [Call(group=group, parts=(part,), blocking=blocking, line=line, function="stage")]

    out: Step = [*_data(shape)]
    for _ in range(shape.microbatches):
        out += [*message("recv", -1, 510), Kernel(shape.kernel_s), *message("send", 1, 512)]
    for _ in range(shape.microbatches):
        out += [*message("recv", 1, 520), Kernel(shape.kernel_s * 2), *message("send", -1, 522)]
    return [*out, Kernel(shape.kernel_s), *_loss(shape, rank), *_extra(shape, rank, step)]


def _moe(shape: Shape, rank: int, step: int) -> Step:
    """Exchange tokens with experts, with counts that differ by rank, layer and step."""
    group = shape.layout.group("ep", rank)
    size = len(group.ranks)
    mine = group.ranks.index(rank)
    out: Step = [*_data(shape)]
    for layer in range(shape.layers):
        tokens = _token_matrix(size, step, layer)
        sends = tuple(tokens[mine])
        receives = tuple(tokens[other][mine] for other in range(size))
        for line, there, back in ((610, sends, receives), (616, receives, sends)):
            out.append(Kernel(shape.kernel_s))
            out.append(
                Call(
                    group=group,
                    operation="all_to_all",
                    inputs=((sum(there), 4),),
                    outputs=((sum(back), 4),),
                    sends=there,
                    receives=back,
                    line=line,
                    function="moe_layer",
                )
            )
    out.append(_call(shape, "dp", rank, "all_reduce", 3000, line=640, function="reduce_gradients"))
    return [*out, *_loss(shape, rank), *_extra(shape, rank, step)]


def _token_matrix(size: int, step: int, layer: int) -> list[list[int]]:
    random = Random(f"{step}/{layer}")
    return [[random.randint(1, 20) for _ in range(size)] for _ in range(size)]


def _context(shape: Shape, rank: int, step: int) -> Step:
    """Pass keys and values around a ring of ranks that share a sequence."""
    group = shape.layout.group("cp", rank)
    size = len(group.ranks)
    mine = group.ranks.index(rank)
    parts = (
        Part("send", group.ranks[(mine + 1) % size], (128, 4)),
        Part("recv", group.ranks[(mine - 1) % size], (128, 4)),
    )
    out: Step = [*_data(shape)]
    for layer in range(shape.layers):
        for hop in range(min(size - 1, 3)):
            tag = f"k{layer}.{hop}"
            out.append(
                Call(
                    group=group,
                    parts=parts,
                    batched=True,
                    blocking=False,
                    tag=tag,
                    line=710,
                    function="ring_attention",
                )
            )
            out += [Kernel(shape.kernel_s), Wait(tag)]
    out.append(_call(shape, "dp", rank, "all_reduce", 3500, line=740, function="reduce_gradients"))
    return [*out, *_loss(shape, rank), *_extra(shape, rank, step)]


def _ulysses(shape: Shape, rank: int, step: int) -> Step:
    """Exchange sequence shards for head shards by all-to-all with equal splits."""
    group = shape.layout.group("cp", rank)
    size = len(group.ranks)
    even = (24,) * size
    out: Step = [*_data(shape)]
    for _ in range(shape.layers):
        for line in (810, 816):
            out.append(Kernel(shape.kernel_s))
            out.append(
                Call(
                    group=group,
                    operation="all_to_all",
                    inputs=((24 * size, 4),),
                    outputs=((24 * size, 4),),
                    sends=even,
                    receives=even,
                    line=line,
                    function="attention",
                )
            )
    out.append(_call(shape, "dp", rank, "all_reduce", 3500, line=740, function="reduce_gradients"))
    return [*out, *_loss(shape, rank), *_extra(shape, rank, step)]


def _gloo(shape: Shape, rank: int, step: int) -> Step:
    out: Step = [*_data(shape)]
    for bucket in range(shape.layers):
        out += [Kernel(shape.kernel_s), Sync()]
        out.append(_call(shape, "dp", rank, "all_reduce", 1000 + bucket, line=40))
        out.append(Sync())
    if "tp" in dict(shape.layout.axes):
        out += [_call(shape, "tp", rank, "all_reduce", 700, line=52), Sync()]
    return [*out, *_loss(shape, rank), Sync(), *_extra(shape, rank, step)]


def _line(name: str) -> Callable[[int], tuple[tuple[str, int], ...]]:
    return lambda n: ((name, n),)


def _plane(outer: str, inner: str, width: int) -> Callable[[int], tuple[tuple[str, int], ...]]:
    return lambda n: ((outer, n // width), (inner, width))


def _cube(n: int) -> tuple[tuple[str, int], ...]:
    stages = 2 if n < 16 else 4
    return (("pp", stages), ("dp", n // (2 * stages)), ("tp", 2))


PROGRAMS: dict[str, Program] = {
    one.name: one
    for one in (
        Program("ddp", _line("dp"), _ddp),
        Program("fsdp2", _line("dp"), _fsdp2),
        Program("hsdp", _plane("replicate", "shard", 4), _hsdp),
        Program("tp_dp", _plane("dp", "tp", 4), _tp_dp),
        Program("megatron", _cube, _megatron),
        Program("pp_dp", _plane("dp", "pp", 4), _pp_dp),
        Program("gpipe", _plane("dp", "pp", 4), _gpipe),
        Program("moe", _plane("dp", "ep", 4), _moe),
        Program("ring_attention", _plane("dp", "cp", 4), _context),
        Program("ulysses", _plane("dp", "cp", 4), _ulysses),
        Program("gloo_ddp", _line("dp"), _gloo, "gloo"),
        Program("gloo_tp_dp", _plane("dp", "tp", 2), _gloo, "gloo"),
    )
}


def draw_shape(random: Random, program: Program, world_size: int) -> Shape:
    """Draw the random parameters of a job."""
    hashed = program.backend == "nccl" and random.random() < 0.3
    layout = mesh(
        program.axes(world_size), hashed=hashed, described=hashed or random.random() < 0.6
    )
    return Shape(
        layout=layout,
        layers=random.randint(2, 2 if world_size > 64 else 5),
        microbatches=random.randint(3, 3 if world_size > 64 else 6),
        kernel_s=random.uniform(1e-3, 6e-3),
        data_s=random.uniform(1e-4, 4e-3),
        syncs=random.random() < 0.7,
        extra_every=random.choice((0, 0, 3)),
    )
