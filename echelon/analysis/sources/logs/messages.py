"""Recognize messages that libraries, drivers, the kernel and schedulers log when a job fails.

Each entry gives a cause, a remedy, and whether the message reports a root cause or a consequence.
The messages are those of PyTorch 2.0 to 2.13, NCCL 2.14 to 2.28, RCCL, oneCCL, Gloo, the NVIDIA
driver (https://docs.nvidia.com/deploy/xid-errors), Linux and Slurm. If several entries match a
line, the first entry is used.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from echelon.analysis.finding import Cause

_MAX_LINE_CHARS = 2000
# A library that warns continues: torch's `[W1122 ...]`, Python's and elastic's warnings.
_WARNING = re.compile(r"^\[?W\d{3,4} |^\[W |\bWARNING\b|\w*Warning: ")
# Most lines of a log are training output with none of these words; they skip the table.
_TELLING = (
    "err", "fail", "kill", "memory", "shm", "xid", "bit ecc", "nvlink", "nvswitch", "fallen",
    "lost", "busy", "oom", "mismatch", "duplicate gpu", "closed", "reset", "timed out", "timeout",
    "watchdog", "heartbeat", "abort", "exited", "fault", "link down", "is down", "interface",
    "no space", "quota", "stale", "not connected", "too many", "ancdata", "dump", "illegal",
    "cancelled", "signal", "*** sig", "unable", "driver", "kernel image", "no cuda", "no hip",
    "no rocm", "already in use", "entire process", "joined", "got completion",
)  # fmt: skip


class Role(Enum):
    """The significance of a message: whether it reports a root cause or a consequence."""

    ROOT = "its own trouble"
    CONSEQUENCE = "trouble that came from elsewhere"


@dataclass(frozen=True, slots=True)
class Message:
    """A known kind of log message. `name` is its name in the documentation."""

    name: str
    pattern: re.Pattern[str]
    cause: Cause
    role: Role
    advice: str


@dataclass(frozen=True, slots=True)
class Said:
    """An occurrence of a known message in a log."""

    message: Message
    line: str
    num_after: int


def _root(name: str, cause: Cause, pattern: str, advice: str) -> Message:
    return Message(name, re.compile(pattern), cause, Role.ROOT, advice)


def _follows(name: str, cause: Cause, pattern: str, advice: str) -> Message:
    return Message(name, re.compile(pattern), cause, Role.CONSEQUENCE, advice)


_DRIVER = "Take the device out of the job: read dmesg and its error counters, then reset it."
_PEER = "Look at the rank that the connection led to: it ended first, or its link broke."
_SHM = "Give the container more shared memory (docker --shm-size), or use fewer loader workers."

MESSAGES: tuple[Message, ...] = (
    _follows(
        "xid-45", Cause.DEVICE_STUCK, r"NVRM: Xid \(PCI:[\da-fA-F:.]+\): 45,",
        "Xid 45 follows the end of a process; look for what ended it.",
    ),
    _root(
        "xid-program", Cause.EXCEPTION, r"NVRM: Xid \(PCI:[\da-fA-F:.]+\): (?:13|31|43),",
        "A kernel of the program accessed memory that it does not own: run with "
        "CUDA_LAUNCH_BLOCKING=1 or compute-sanitizer. If it happens on one device only, replace "
        "that device.",
    ),
    _root("xid", Cause.DEVICE_STUCK, r"NVRM: Xid \(PCI:[\da-fA-F:.]+\): \d{1,3},", _DRIVER),
    _root(
        "ecc", Cause.DEVICE_STUCK,
        r"(?i)uncorrectable ecc error|double[- ]bit ecc|uncorrectable hardware errors? detected",
        _DRIVER,
    ),
    _root(
        "nvlink", Cause.DEVICE_STUCK,
        r"(?i)uncorrectable nvlink error|nvlink (?:fatal )?error|nvswitch.{1,40}fatal", _DRIVER,
    ),
    _root(
        "off-the-bus", Cause.DEVICE_STUCK,
        r"(?i)gpu has fallen off the bus|gpu is lost|_RESULT_ERROR_DEVICE_LOST"
        r"|devices? (?:are|is) busy or unavailable", _DRIVER,
    ),
    _root(
        "fabric-manager", Cause.DEVICE_STUCK, r"CUDA error: system not yet initialized",
        "Start nvidia-fabricmanager on this node, in the version that matches the driver.",
    ),
    _root(
        "kernel-oom", Cause.OUT_OF_MEMORY,
        r"(?i)out of memory: killed process \d+|oom-kill:constraint=|invoked oom-killer"
        r"|detected \d+ oom[-_]kill event|\bOOMKilled\b|: tasks? [\d,-]+: Out Of Memory",
        "The host's memory was used up: lower what loaders and checkpoints hold, or raise the "
        "job's limit.",
    ),
    _root(
        "device-oom", Cause.OUT_OF_MEMORY,
        r"(?i)(?:cuda|hip|xpu|npu)(?: error:| failure(?: \d+)? ')? ?out of memory"
        r"|_RESULT_ERROR_OUT_OF_DEVICE_MEMORY|torch\.(?:cuda\.)?OutOfMemoryError",
        "Lower the batch size, the sequence length or what is kept for the backward pass; check "
        "whether this rank alone needs more (uneven batches, an evaluation, another process on "
        "its device).",
    ),
    _root(
        "shared-memory", Cause.OUT_OF_MEMORY,
        r"insufficient shared memory \(shm\)|dataloader's workers are out of shared memory"
        r"|unable to (?:write|open shared memory object) .{0,10}</torch_"
        r"|unable to allocate shared memory\(shm\)|enlarge /dev/shm"
        r"|is killed by signal: Bus error",
        _SHM,
    ),
    _root(
        "loader-killed", Cause.OUT_OF_MEMORY,
        r"DataLoader worker \(pid(?:\(s\))? [\d, ]+\) is killed by signal: Killed",
        "Most often, the kernel killed the worker because memory ran out (see dmesg): lower "
        "num_workers, prefetch_factor or what each worker holds.",
    ),
    _root(
        "loader-died", Cause.EXCEPTION,
        r"DataLoader worker \(pid(?:\(s\))? [\d, ]+\) (?:is killed by signal|exited unexpectedly)",
        "Run the loader with num_workers=0 to see why its worker dies.",
    ),
    _root(
        "illegal-access", Cause.EXCEPTION,
        r"(?:CUDA|HIP) error: (?:an illegal memory access|device-side assert|unspecified launch "
        r"failure|misaligned address)|Memory access fault by GPU node",
        "Run with CUDA_LAUNCH_BLOCKING=1 (AMD_SERIALIZE_KERNEL=3): the traceback then shows the "
        "kernel. A label out of range is the usual cause of a device-side assert.",
    ),
    _root(
        "duplicate-gpu", Cause.EXCEPTION, r"Duplicate GPU detected ?: rank \d+ and rank \d+",
        "Two ranks use one device: call torch.cuda.set_device(LOCAL_RANK) before the first "
        "collective, and start no more ranks than devices.",
    ),
    _root(
        "no-such-device", Cause.EXCEPTION,
        r"(?:CUDA|HIP) error: invalid device ordinal|No CUDA GPUs are available"
        r"|no (?:CUDA|HIP|ROCm)-capable device",
        "The rank sees fewer devices than expected: check CUDA_VISIBLE_DEVICES and the "
        "scheduler's request.",
    ),
    _root(
        "driver-version", Cause.EXCEPTION,
        r"driver version is insufficient|NVIDIA driver on your system is too old"
        r"|no kernel image is available for execution",
        "This build does not match this node's driver or device: install a matching build on all "
        "nodes.",
    ),
    _root(
        "mismatch", Cause.OP_MISMATCH,
        r"Detected mismatch between collectives on ranks|Mismatched collective detected",
        "The ranks called different collectives: compare the lines that the message names.",
    ),
    _root(
        "no-interface", Cause.NETWORK,
        r"Bootstrap ?: no socket interface found|NET/Socket ?: no interface found"
        r"|Unable to find interface|makeDeviceForInterface",
        "Name the interface that the nodes share: NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME.",
    ),
    _root(
        "ib-port", Cause.NETWORK,
        r"NET/IB ?:.{0,120}(?:port error|async (?:fatal )?event|fatal (?:error )?event)"
        r"|mlx\d+_\d+.{0,40}(?:Link DOWN|port is down)",
        "Look at the port's state and counters on this node (ibstat, perfquery).",
    ),
    _root(
        "address-in-use", Cause.EXCEPTION,
        r"EADDRINUSE|[Aa]ddress already in use",
        "Another process holds the port: choose a free one (--rdzv-endpoint HOST:0), or end the "
        "job before.",
    ),
    _root(
        "disk-full", Cause.EXCEPTION,
        r"No space left on device|Disk quota exceeded",
        "Free space, or raise the quota, where this rank writes.",
    ),
    _root(
        "storage", Cause.EXCEPTION,
        r"Stale (?:NFS )?file handle|Errno 5\] Input/output error|Remote I/O error"
        r"|Transport endpoint is not connected",
        "The file system failed on this node: check its mount, then the storage itself.",
    ),
    _root(
        "descriptors", Cause.EXCEPTION,
        r"Errno 24\] Too many open files|received 0 items of ancdata",
        "Raise the limit (ulimit -n), or set torch.multiprocessing's sharing strategy to "
        "file_system.",
    ),
    _root(
        "crash", Cause.DEAD_PROCESS,
        r"Fatal Python error: (?!Aborted)|[Ss]egmentation fault|Bus error \(core dumped\)"
        r"|\*\*\* SIG(?:SEGV|BUS|FPE|ILL) received|Illegal instruction",
        "Look at the C frames under this line; run with faulthandler, or under a debugger.",
    ),
    _root(
        "node-failure", Cause.DEAD_PROCESS,
        r"DUE TO NODE \S{0,255} ?FAILURE|srun: error: Node failure on",
        "The scheduler lost a node: exclude it, and check its console.",
    ),
    _root(
        "scheduler", Cause.DEAD_PROCESS,
        r"CANCELLED AT \S{1,40} DUE TO (?:TIME LIMIT|PREEMPTION|JOB REQUEUE)",
        "The scheduler ended the job: ask for more time, or save and resume.",
    ),
    _follows(
        "watchdog", Cause.NETWORK,
        r"[Ww]atchdog caught collective operation timeout|taking the entire process down"
        r"|[Hh]eartbeat ?[Mm]onitor|watchdog got stuck|watchdog thread terminated",
        "This rank waited in vain: look at the ranks that did not, and at torch's flight recorder.",
    ),
    _follows(
        "ib-retries", Cause.NETWORK,
        r"NET/IB ?:.{0,120}[Gg]ot completion from peer.{0,80}(?:status=|error )(?:12|13)\b",
        "The peer named there stopped answering: it ended, or the link between the two broke.",
    ),
    _follows(
        "nccl-remote", Cause.NETWORK,
        r"ncclRemoteError|remote process exited|NCCL communicator was aborted", _PEER,
    ),
    _follows(
        "connection-lost", Cause.NETWORK,
        r"gloo/transport/.{0,80}Connection (?:closed|reset) by peer|connectFullMesh failed"
        r"|Connection closed by (?:remote )?peer|Connection reset by peer"
        r"|[Ss]ocket\w{0,20}: ?Connect to \S+ failed|PeerLostError",
        _PEER,
    ),
    _follows(
        "gloo-timeout", Cause.NETWORK, r"gloo/transport/.{0,120}Timed out waiting \d+ms",
        "This rank waited in vain: look at the ranks that did not.",
    ),
    _follows(
        "monitored-barrier", Cause.HOST_HANG,
        r"Ranks? [\d, ]+ failed to pass monitoredBarrier", "Look at the ranks that are named.",
    ),
    _follows(
        "clients-missing", Cause.STORE_WAIT,
        r"Timed out after \d+ seconds waiting for clients\. \d+/\d+ clients joined"
        r"|RendezvousTimeoutError",
        "Find the nodes that never joined: did all start, with the same endpoint and node count?",
    ),
    _follows(
        "store-unreachable", Cause.STORE_WAIT,
        r"client socket has (?:timed out|failed to connect)|RendezvousConnectionError"
        r"|failed to connect to \(",
        "The first node's store cannot be reached: check MASTER_ADDR, the port and the firewall.",
    ),
    _follows(
        "store-timeout", Cause.STORE_WAIT,
        r"wait timeout after \d+ms|StoreTimeoutError|DistStoreError",
        "Find the rank that should have written the key.",
    ),
    _follows(
        "terminated", Cause.DEAD_PROCESS,
        r"Received Signals\.SIGTERM|SignalException: Process \d+ got signal|Sending process \d+ "
        r"closing signal SIGTERM",
        "The launcher ended this rank because another rank had failed.",
    ),
)  # fmt: skip


def messages_in(text: str) -> Iterator[Said]:
    """Yield the known messages found in the lines of a log."""
    for start, end in _telling_lines(text):
        line = text[start : min(end, start + _MAX_LINE_CHARS)].strip()
        message = next((one for one in MESSAGES if one.pattern.search(line)), None)
        if message is None or (message.role is Role.ROOT and _WARNING.search(line)):
            continue
        yield Said(message, line, text.count("\n", end))


def _telling_lines(text: str) -> list[tuple[int, int]]:
    lowered = text.lower()
    if len(lowered) != len(text):  # a few letters have longer small ones
        lowered = text
    found: set[tuple[int, int]] = set()
    for word in _TELLING:
        place = lowered.find(word)
        while place >= 0:
            start, end = lowered.rfind("\n", 0, place) + 1, lowered.find("\n", place)
            end = len(lowered) if end < 0 else end
            found.add((start, end))
            place = lowered.find(word, end)
    return sorted(found)
