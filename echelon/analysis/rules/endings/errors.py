"""Classify errors from torch, NCCL and echelon by their origin.

An error can originate in the rank itself, its memory or its device. An error that is attributed
to a peer, the network or a watchdog is only a consequence of a failure elsewhere. If the type of
an exception is ambiguous, its message is examined.
"""

from __future__ import annotations

import re
from enum import Enum

_OWN_ERRORS = ("echelon.errors.",)
_OWN_NAMES = frozenset(
    {
        "CollectiveError",
        "CollectiveMismatchError",
        "CollectiveTimeoutError",
        "PeerLostError",
        "StoreError",
        "StoreTimeoutError",
        "StoreConnectionError",
    }
)
_TORCH_NAMES = frozenset({"DistBackendError", "DistNetworkError", "DistStoreError"})
_PLAIN_NAMES = frozenset(
    {
        "RuntimeError",
        "AcceleratorError",
        "ConnectionError",
        "ConnectionResetError",
        "BrokenPipeError",
        "TimeoutError",
    }
)
_MEMORY_TYPES = ("MemoryError", "OutOfMemoryError")
_MEMORY = re.compile(
    r"\b(?:cuda|hip|xpu|npu)(?: error:| failure \d+ ')? ?out of memory|cannot allocate memory"
)
_DEVICE = re.compile(
    r"\becc error|uncorrectable|\bxid\b|fallen off the bus|nvlink error|hardware stack error"
    r"|device (?:is )?unavailable|\bgpu is lost\b|hip error: .*hardware"
)
_NO_SPACE = "no space left on device"  # of the rank's own machine, whichever rank reports it
# About the rank itself, whatever else the text quotes.
_OWN = re.compile(
    r"duplicate gpu detected|invalid usage|invalid argument|illegal memory access"
    r"|device-side assert|address already in use|eaddrinuse|no such file"
)
_CONSEQUENCE = re.compile(
    r"connection closed|connection reset|connection refused|broken pipe|gloo/transport/"
    r"|connectfullmesh|remote process exited|ncclremoteerror|communicator was aborted"
    r"|watchdog caught collective|timed out|timeout|socket|peer closed|failed to recv"
)
# A frame or a file of these in the text shows that the error passed through a communication
# library.
_COMMUNICATION = re.compile(
    r"gloo/transport/|processgroup|nccl|torch[/\\]distributed[/\\]|tcpstore|\[c10d\]|connectfullmesh"
    r"|distributed_c10d|echelon[/\\](?:dist|store)[/\\]"
)
_WATCHDOG = re.compile(
    r"Watchdog caught collective operation timeout: \w{1,40}\(SeqNum=(\d{1,12}), OpType=(\w{1,40})"
)
_GLOO_TIMEOUT = re.compile(r"gloo/transport/[^\n]{1,200}Timed out waiting (\d{1,12})ms for ")
_MAX_ERROR_CHARS = 2000
_CPP_ABORT = re.compile(r"^terminate called [^\n]{1,200}", re.MULTILINE)
_JOINABLE = "terminate called without an active exception"
_DIED_BY_WATCHDOG = re.compile(
    r"watchdog (?:caught|thread terminated|got stuck)|collective operation timeout"
    r"|taking the entire process down|heartbeatmonitor|remote process exited",
    re.IGNORECASE,
)


class Meaning(Enum):
    """The origin of an uncaught error."""

    OWN = "the rank's own"
    CONSEQUENCE = "of a peer, the network or a watchdog"
    MEMORY = "memory is used up"
    DEVICE = "the device failed"


def meaning_of(
    type_name: str, message: str, bases: tuple[str, ...] = (), traceback: str = ""
) -> Meaning:
    """Classify an uncaught error by its origin.

    Args:
        bases: the base classes of the error's type, if recorded.
        traceback: the frames of the error's traceback; "" if unknown.
    """
    name = type_name.rpartition(".")[2]
    names = {name, *(base.rpartition(".")[2] for base in bases)}
    words = message.lower()
    if _is_echelons(type_name, message, bases):
        return Meaning.OWN if _NO_SPACE in words else Meaning.CONSEQUENCE
    if names & set(_MEMORY_TYPES) or (
        names & ({"RuntimeError"} | _TORCH_NAMES) and _MEMORY.search(words)
    ):
        return Meaning.MEMORY
    if not names & (_PLAIN_NAMES | _TORCH_NAMES):
        return Meaning.OWN
    if _DEVICE.search(words):
        return Meaning.DEVICE
    if name in _TORCH_NAMES:
        return Meaning.OWN if _is_torchs_own(name, words) else Meaning.CONSEQUENCE
    if _CONSEQUENCE.search(words) and _COMMUNICATION.search(f"{words}\n{traceback.lower()}"):
        return Meaning.CONSEQUENCE
    return Meaning.OWN


def _is_echelons(type_name: str, message: str, bases: tuple[str, ...]) -> bool:
    if any(kind.startswith(_OWN_ERRORS) for kind in (type_name, *bases)):
        return True
    name = type_name.rpartition(".")[2]
    if name in _OWN_NAMES:
        return True
    # echelon's own error, passing through torch's C++
    return name == "RuntimeError" and any(f"{own}: " in message for own in _OWN_NAMES)


def _is_torchs_own(name: str, words: str) -> bool:
    if _OWN.search(words):
        return True
    if name != "DistBackendError" or _CONSEQUENCE.search(words):
        return False
    return "unhandled cuda error" in words or "internal error" in words or "system error" in words


def watchdog_timeout(stderr: str) -> tuple[int, str] | None:
    """Return the number and type of the operation whose timeout torch's watchdog logged.

    Return None if the watchdog did not log a timeout.
    """
    found = _WATCHDOG.findall(stderr)
    return (int(found[0][0]), found[0][1].lower()) if found else None


def gloo_timeout_s(stderr: str) -> float:
    """Return how many seconds a rank had waited when Gloo timed out; 0 if Gloo did not time out."""
    found = _GLOO_TIMEOUT.findall(stderr)
    return int(found[-1]) / 1000 if found else 0.0


def was_cut_by_gloo(stderr: str) -> bool:
    """Return whether the last error on a rank's stderr comes from Gloo's transport."""
    return "gloo/transport/" in stderr[-_MAX_ERROR_CHARS:]


def cpp_abort(stderr: str) -> str:
    """Return the line that the C++ runtime logged when it aborted a process, or "" if none."""
    found = _CPP_ABORT.findall(stderr)
    return found[-1] if found else ""


def is_gloos_exit(stderr: str) -> bool:
    """Return whether Gloo's threads might have aborted a process while it was exiting."""
    line = cpp_abort(stderr)
    return line == _JOINABLE or ("gloo::" in line and was_cut_by_gloo(stderr))


def died_by_watchdog(stderr: str) -> bool:
    """Return whether stderr shows that a process aborted because of a watchdog or a lost peer."""
    return bool(_DIED_BY_WATCHDOG.search(stderr))
