"""The families of cases: faults in a job, and the expected diagnoses.

A family modifies the programs of some ranks at one place and states the truth. Valid answers are
stated per case: acceptable sets of ranks and acceptable causes, the best one first. A case is
decidable if the records can single out the culprits. This is computed from the finished run, not
from any analyzer's answer.
"""

from __future__ import annotations

from benchmarks.verdicts.engine import Engine, Launch
from benchmarks.verdicts.families.calls import (
    all_alike,
    dtype_mismatch,
    even_splits,
    op_mismatch,
    shape_mismatch,
)
from benchmarks.verdicts.families.devices import device_kernel, device_unnoticed, network
from benchmarks.verdicts.families.health import (
    healthy_active_only,
    healthy_after_stall,
    healthy_end,
    healthy_in_flight,
    healthy_slow_rank,
    healthy_wrapped,
)
from benchmarks.verdicts.families.hosts import (
    dead_host,
    dead_rank,
    hang_and_lost_dump,
    host_hang,
    host_hang_data,
    host_hang_first_use,
    host_hang_subgroup,
    two_host_hangs,
)
from benchmarks.verdicts.families.messages import p2p_dtype, p2p_missing, p2p_size, p2p_wrong_peer
from benchmarks.verdicts.families.scene import (
    ALL,
    BATCHED,
    COLLECTIVE,
    NCCL,
    PIPELINES,
    SUBGROUPS,
    Family,
    Truth,
)
from benchmarks.verdicts.families.streams import extra, order_desync, skipped, uneven_inputs

FAMILIES: tuple[Family, ...] = (
    Family("healthy_end", healthy_end, ALL),
    Family("healthy_in_flight", healthy_in_flight, ALL),
    Family("healthy_active_only", healthy_active_only, NCCL),
    Family("healthy_wrapped_ring", healthy_wrapped, ALL),
    Family("healthy_slow_rank", healthy_slow_rank, NCCL),
    Family("healthy_after_stall", healthy_after_stall, NCCL),
    Family("host_hang", host_hang, ALL),
    Family("host_hang_subgroup", host_hang_subgroup, SUBGROUPS),
    Family("host_hang_first_use", host_hang_first_use, ALL),
    Family("host_hang_data", host_hang_data, ALL),
    Family("two_host_hangs", two_host_hangs, COLLECTIVE),
    Family("dead_rank", dead_rank, ALL),
    Family("dead_host", dead_host, NCCL),
    Family("hang_and_lost_dump", hang_and_lost_dump, COLLECTIVE),
    Family("device_kernel", device_kernel, NCCL),
    Family("device_unnoticed", device_unnoticed, NCCL),
    Family("network", network, ("ddp", "fsdp2", "tp_dp", "hsdp", "gloo_ddp")),
    Family("op_mismatch", op_mismatch, COLLECTIVE),
    Family("shape_mismatch", shape_mismatch, COLLECTIVE),
    Family("dtype_mismatch", dtype_mismatch, COLLECTIVE),
    Family("all_wrong_alike", all_alike, ("fsdp2", "hsdp")),
    Family("split_mismatch", even_splits, ("ulysses",)),
    Family("skipped_collective", skipped, COLLECTIVE),
    Family("extra_collective", extra, COLLECTIVE),
    Family("uneven_inputs", uneven_inputs, ("ddp", "fsdp2", "gloo_ddp")),
    Family("order_desync", order_desync, ("tp_dp", "hsdp")),
    Family("p2p_missing", p2p_missing, PIPELINES),
    Family("p2p_wrong_peer", p2p_wrong_peer, ("pp_dp", "gpipe", "ring_attention")),
    Family("p2p_size", p2p_size, (*BATCHED, "gpipe")),
    Family("p2p_dtype", p2p_dtype, (*BATCHED, "gpipe")),
)


def is_decidable(truth: Truth, engine: Engine) -> bool:
    """Return whether the final state of a run can single out the culprits.

    A rank whose host hangs must have no pending operation, because it would then seem to be
    waiting. In addition, another rank must be waiting for it.
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
    """Return whether all other members have started an operation that the culprit has not."""
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
