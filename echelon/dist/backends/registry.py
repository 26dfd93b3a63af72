"""List the available backends, and create a backend's engine for a group.

A backend is either listed in `_OWN` or provided by an installed package through the entry point
group `echelon.backends`. The entry point must refer to a function with the signature of `create`
in `echelon.dist.backends.shm.backend`. The function can have these optional attributes:

    not_ready: a function that returns the reason the backend cannot run here, or ""
    device: the kind of device whose arrays the backend transfers; "cpu" by default
    needs_own_device: a function that returns whether each rank needs its own device
    runtime: a function that returns the replacement for torch's runtime for a kind of device
    versions: a function that returns the versions of the libraries in use
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any, cast

from echelon.dist.backends.interface import Engine, Members
from echelon.store import PrefixStore

ENTRY_POINTS = "echelon.backends"
_OWN = ("shm", "gloo", "shm+gloo", "xccl", "nccl")
_MODULES = {
    "shm": "echelon.dist.backends.shm.backend",
    "gloo": "echelon.dist.backends.gloo.backend",
    "shm+gloo": "echelon.dist.backends.two_level",
    "xccl": "echelon.dist.backends.xccl.backend",
    "nccl": "echelon.dist.backends.device.nccl",
}

_DEVICES = {"cuda": "nccl", "xpu": "xccl"}

Create = Callable[[Members, PrefixStore, float], Engine]


@dataclass(frozen=True, slots=True)
class Status:
    """Whether a backend is ready on this machine, and the `reason` if it is not."""

    name: str
    ready: bool
    reason: str = ""
    source: str = "echelon"
    versions: str = ""  # of the packages that it depends on


def create(name: str, members: Members, store: PrefixStore, timeout_s: float) -> Engine:
    """Create a group's engine from the backend `name`; every member must call this.

    Raises:
        ValueError: the backend does not exist or cannot run here.
        CollectiveTimeoutError: some members did not join within `timeout_s` seconds.
    """
    found, not_ready, _ = _find(name)
    try:
        reason = not_ready()
    except Exception as err:  # noqa: BLE001 -- a plug-in's own, of any class
        reason = f"{type(err).__name__}: {err}"
    if reason:
        raise ValueError(f"backend {name!r} is not ready: {reason}")
    return found(members, store, timeout_s)


def check_name(name: str) -> None:
    """Check that a backend of this name exists.

    Raises:
        ValueError: the backend does not exist; the error lists the known backends.
    """
    _find(name)


def for_device(device: str) -> tuple[str, str]:
    """Return (backend, "") for arrays on a device, or ("", the reason) if no backend is ready.

    Echelon's own backends take precedence over plug-ins.
    """
    reason = f"no backend carries arrays on {device}"
    names = [_DEVICES[device]] if device in _DEVICES else []
    for name in (*names, *sorted(_plugins())):
        try:
            made, not_ready, _ = _find(name)
            if name not in names and getattr(made, "device", "cpu") != device:
                continue
            lack = not_ready()
        except Exception as err:  # noqa: BLE001 -- a broken plug-in must not stop a job that does not use it
            lack = f"{type(err).__name__}: {err}"
        if not lack:
            return name, ""
        reason = f"backend {name!r} is not ready: {lack}"
    return "", reason


def needs_own_device(name: str) -> bool:
    """Return whether a backend requires each rank to have a device of its own."""
    asks = getattr(_find(name)[0], "needs_own_device", None)
    return asks is not None and bool(asks())


def runtime(device: str) -> Callable[[str], Any] | None:
    """Return a plug-in's replacement for torch's runtime for this kind of device, or None."""
    for name in sorted(_plugins()):
        with contextlib.suppress(Exception):  # a broken plug-in is not in the way
            made = _find(name)[0]
            if getattr(made, "device", "cpu") == device:
                found: Callable[[str], Any] | None = getattr(made, "runtime", None)
                return found
    return None


def statuses() -> list[Status]:
    """Return the status of every known backend, beginning with echelon's own."""
    found = []
    for name in (*_OWN, *sorted(_plugins())):
        try:
            made, not_ready, source = _find(name)
            reason = not_ready()
            versions = getattr(made, "versions", lambda: "")()
        except Exception as err:  # noqa: BLE001 -- a broken plug-in is a line in the list, not an end
            reason, source, versions = f"{type(err).__name__}: {err}", "plug-in", ""
        found.append(Status(name, not reason, reason, source, versions))
    return found


def _find(name: str) -> tuple[Create, Callable[[], str], str]:
    if name in _MODULES:
        try:
            module: Any = importlib.import_module(_MODULES[name])
        except ModuleNotFoundError as err:
            if err.name is None or not err.name.startswith("echelon"):
                raise
            raise ValueError(f"backend {name!r} is not part of this version of echelon") from None
        return module.create, module.not_ready, "echelon"
    plugins = _plugins()
    if name not in plugins:
        known = ", ".join((*_OWN, *sorted(plugins)))
        raise ValueError(f"unknown backend {name!r}; use one of {known}")
    point = plugins[name]
    made = cast("Create", point.load())
    return made, getattr(made, "not_ready", lambda: ""), point.value


def _plugins() -> dict[str, Any]:
    return {
        point.name: point
        for point in entry_points(group=ENTRY_POINTS)
        if point.name not in _MODULES
    }
