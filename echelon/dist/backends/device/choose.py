"""Choose the engine for a group's device arrays.

The device library's engine (NCCL, oneCCL or a plug-in) is used if it is ready on all ranks and each
rank has its own device. In all other cases, and in groups created with a host backend, arrays pass
through pinned host memory (`engines/staged.py`). The ranks agree on the choice.
"""

from __future__ import annotations

from collections import Counter

from echelon.dist.backends import registry
from echelon.dist.backends.device.engines.staged import StagedEngine
from echelon.dist.backends.device.runtime import DeviceRuntime
from echelon.dist.backends.interface import Engine, Members
from echelon.dist.membership.meet import exchange
from echelon.store import PrefixStore
from echelon.store.deadline import time_left_s


def refusal(device: str, *, is_staged: bool) -> str:
    """Return the reason this rank cannot transfer arrays on this kind of device, or "" if it can.

    The check is local to this rank.

    Args:
        device: the kind of device, such as "cuda" or "xpu".
        is_staged: whether arrays must be staged through host memory.
    """
    name, reason = ("", "") if is_staged else registry.for_device(device)
    if name:
        return ""
    lack = _lack(device)
    return f"{reason}; {lack}" if lack and reason else lack


def create(
    members: Members,
    store: PrefixStore,
    host: str,
    deadline_s: float,
    *,
    is_staged: bool,
) -> Engine:
    """Create the engine for a group's device arrays; every member must call this.

    Args:
        members: the members of the group, and the device of this rank.
        store: a view of the store, for use by this engine only.
        host: the name of the backend for host arrays.
        deadline_s: the deadline on the monotonic clock, in seconds.
        is_staged: whether arrays must be staged through host memory.

    Raises:
        ValueError: some rank cannot transfer arrays from its device.
        CollectiveTimeoutError: some members did not call this function by `deadline_s`.
    """
    name = "" if is_staged else registry.for_device(members.device)[0]
    is_own = bool(name) and registry.needs_own_device(name)
    index = members.device_index
    mine = {"name": name, "device": _runtime(members.device).identity(index) if is_own else ""}
    facts = exchange(members, store, "devices", mine, deadline_s)
    is_shared = max(Counter(fact["device"] for fact in facts).values()) > 1
    is_alike = len({fact["name"] for fact in facts}) == 1
    if name and is_alike and not (is_own and is_shared):
        return registry.create(name, members, store, time_left_s(deadline_s))
    runtime = _runtime(members.device)
    below = registry.create(host, members, PrefixStore("host", store), time_left_s(deadline_s))
    return StagedEngine(runtime, members, below)


def _lack(device: str) -> str:
    try:
        is_there = bool(_runtime(device).accelerator.is_available())
    except Exception as err:  # noqa: BLE001 -- without a driver it fails in many ways
        return f"no {device} device can be used through torch ({type(err).__name__}: {err})"
    return "" if is_there else f"no {device} device is usable here"


def _runtime(device: str) -> DeviceRuntime:
    made = registry.runtime(device)
    return DeviceRuntime(device) if made is None else made(device)
