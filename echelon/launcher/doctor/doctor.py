"""Run `echelon doctor`: check whether this machine is fit to run a job.

Each check prints one line. If --rdzv-endpoint is given on every node, the nodes also check the
links between them. With --pairwise, the nodes also measure these links.

A check is a function that returns a `Check` and never raises. The backends are checked in a child
process, because importing them imports torch.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import ipaddress
import itertools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from echelon import __version__
from echelon.host.cgroup import usable_cores
from echelon.host.process import sample
from echelon.host.stacks import can_spy
from echelon.launcher.control.conf import read_conf
from echelon.launcher.control.endpoint import Rendezvous, is_local, rendezvous, split
from echelon.launcher.control.tls import TlsFiles, tls_files
from echelon.launcher.doctor import container
from echelon.launcher.doctor.check import Check
from echelon.launcher.doctor.pairwise.command import Pairwise, add_pairwise_options
from echelon.launcher.doctor.shown import Shown
from echelon.launcher.options.arguments import Defaults, Parser, add_node_options
from echelon.launcher.options.options import dashes
from echelon.recorder.write.setup.place import file_system, is_remote

_SHM = Path("/dev/shm")  # noqa: S108 -- only looked at
_SMALL_SHM_BYTES = 1 << 30
_LOGIND = ("/etc/systemd/logind.conf", "/run/systemd/logind.conf", "/usr/lib/systemd/logind.conf")
_LINGER = Path("/var/lib/systemd/linger")
_FIRST_USER = 1000  # logind exempts system users
_CONNECT_S = 3.0
_BACKENDS_S = 60.0
_NODES_S = 60.0  # for the other nodes to start their doctors


def main(argv: Sequence[str]) -> int:
    """Run `echelon doctor`; return the exit code.

    The exit code is 0 on success, 1 if a check or measurement fails, and 2 for a usage error.
    """
    parser = Parser(prog="echelon doctor", description="Check this machine before a job.")
    parser.add_argument("--version", action="version", version=f"echelon {__version__}")
    parser.add_argument(
        "endpoint", nargs="?", metavar="HOST:PORT", help="also check the link to this endpoint"
    )
    nodes = parser.add_argument_group(
        "many nodes", "as for `echelon run`, on every node: check the links between them"
    )
    try:
        add_node_options(nodes, Defaults(os.environ))
    except ValueError as err:
        parser.error(str(err))
    add_pairwise_options(parser.add_argument_group("links"), Defaults(os.environ))
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object instead of lines"
    )
    args = parser.parse_args([dashes(text) for text in argv])
    pairwise = Pairwise(args) if args.pairwise else None
    try:
        across = _across(args, pairwise)
    except ValueError as err:
        parser.error(str(err))
    shown = Shown(is_json=args.json)
    for check in itertools.chain(_checks(args.endpoint), across):
        shown.check(check)
    if pairwise is not None:
        if not pairwise.has_met:
            pairwise.alone()
        shown.outcome(pairwise.outcome)
    return shown.end([] if pairwise is not None else backends())  # the job's own port has been used


def _across(args: argparse.Namespace, pairwise: Pairwise | None) -> Iterator[Check]:
    """Return the results of the checks between nodes; an empty iterator if no endpoint is given.

    Raises:
        ValueError: the options are invalid or incomplete.
    """
    if not args.rdzv_endpoint and not args.master_addr:
        if pairwise is not None and args.nnodes[1] > 1:
            raise ValueError(
                "--nnodes above 1 needs --rdzv-endpoint HOST:PORT, the same on all nodes"
            )
        return iter(())
    try:
        return _prepare(args, pairwise)
    except ValueError as err:
        if args.rdzv_endpoint != Defaults(os.environ)("rdzv_endpoint", ""):
            raise
        return iter([Check("nodes", f"not checked: {err}", ok=False)])  # the scheduler's endpoint


def _prepare(args: argparse.Namespace, pairwise: Pairwise | None) -> Iterator[Check]:
    args.standalone = False
    args.nnodes = args.nnodes if args.nnodes != (1, 1) else (2, 2)
    conf = read_conf(args.rdzv_conf)
    meeting = rendezvous(args, conf, os.environ)
    assert meeting is not None
    tls = tls_files(args, meeting)
    timeout_s = min(conf.join_timeout_s, _NODES_S)
    if pairwise is not None:
        return pairwise.across(meeting, args.nnodes[1], timeout_s, tls)
    return _met(meeting, args.nnodes[1], timeout_s, tls)


def _met(
    meeting: Rendezvous, num_nodes: int, timeout_s: float, tls: TlsFiles | None
) -> Iterator[Check]:
    from echelon.launcher.doctor.checkup import check_nodes  # gRPC only where needed

    for result in check_nodes(meeting, num_nodes, timeout_s, tls):
        yield Check(result.name, result.text, result.ok)


def _checks(endpoint: str | None) -> Iterator[Check]:
    simple: tuple[Callable[[], Check], ...] = (
        python, cores, host_name, loopback_port, shared_memory, run_directory, clock, pidfd, memfd,
        proc, stacks, container.tracing, container.pid_namespace_check, container.limits_check,
        container.user, container.temporary_folder,
    )  # fmt: skip
    for check in simple:
        yield check()
    if endpoint is not None:
        yield way_to(endpoint)


def python() -> Check:
    """Report the version and path of the Python interpreter, and the version of echelon."""
    version = ".".join(map(str, sys.version_info[:3]))
    return Check("python", f"{version} ({sys.executable}), echelon {__version__}")


def cores() -> Check:
    """Report how many CPU cores this process is allowed to use."""
    return Check("cores", f"{usable_cores()} usable of {os.cpu_count() or 0}")


def host_name() -> Check:
    """Check that this host's name resolves to an address that other nodes can reach."""
    name = socket.gethostname()
    try:
        addresses = sorted({str(entry[4][0]) for entry in socket.getaddrinfo(name, None)})
    except socket.gaierror as err:
        return Check(
            "host name",
            f"{name!r} does not resolve ({err.strerror}); give an address instead",
            False,
        )
    reachable = [a for a in addresses if not ipaddress.ip_address(a.split("%")[0]).is_loopback]
    if not reachable:
        return Check(
            "host name",
            f"{name} is {', '.join(addresses)}: other nodes need this machine's address instead",
        )
    foreign = [address for address in reachable if not is_local(address)]
    if foreign:
        return Check("host name", f"{name} is {foreign[0]}, which is not this machine's", False)
    try:
        back = socket.gethostbyaddr(reachable[0])[0]
    except OSError:
        back = "no name"
    return Check("host name", f"{name} -> {reachable[0]} -> {back}")


def loopback_port() -> Check:
    """Check that a port on the loopback interface can be bound and reached."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            start = time.perf_counter()
            with socket.create_connection(server.getsockname(), timeout=_CONNECT_S):
                took_us = (time.perf_counter() - start) * 1e6
    except OSError as err:
        return Check("ports", f"loopback does not work: {err}", False)
    return Check("ports", f"loopback answers in {took_us:.0f} us")


def shared_memory() -> Check:
    """Check the free space in /dev/shm, where the rings are stored while a job runs."""
    if file_system(_SHM) != "tmpfs":
        return Check(
            "shared memory",
            f"{_SHM} is not a tmpfs: rings are kept on disk, where writing may block",
        )
    try:
        usage = shutil.disk_usage(_SHM)
    except OSError as err:
        return Check("shared memory", f"{_SHM}: {err.strerror}", ok=False)
    note = ""
    if usage.free < _SMALL_SHM_BYTES:
        note = ": small for data loaders' workers, which may die of SIGBUS (docker --shm-size=1g)"
    if removes_at_logout(os.getuid(), container.user_name()):
        note += (
            "; systemd removes your files there at logout, including a detached job's rings: "
            "loginctl enable-linger"
        )
    text = f"{usage.free / 1e9:.2f} of {usage.total / 1e9:.2f} GB free in /dev/shm"
    return Check("shared memory", text + note)


def removes_at_logout(uid: int, user: str) -> bool:
    """Return whether logind removes a user's files from /dev/shm at logout (RemoveIPC)."""
    if uid < _FIRST_USER or not Path("/run/systemd/seats").exists():
        return False
    if (_LINGER / user).exists():
        return False
    settings = [Path(name) for name in _LOGIND]
    settings += [part for path in settings for part in sorted(path.parent.glob("logind.conf.d/*"))]
    removes = True  # the default
    for path in settings:
        with contextlib.suppress(OSError):
            for line in path.read_text(errors="replace").splitlines():
                name, _, value = line.partition("=")
                if name.strip() == "RemoveIPC":
                    removes = value.strip().lower() in ("1", "yes", "true", "on")
    return removes


def run_directory() -> Check:
    """Check the file system, the free space and the permissions of the working directory.

    Run directories are created in the working directory by default.
    """
    try:
        kind, free = file_system(Path.cwd()), shutil.disk_usage(Path.cwd()).free
    except OSError as err:
        return Check("run directory", f"the working directory: {err.strerror}", ok=False)
    note = ", a network file system: rings stay on this node" if is_remote(kind) else ""
    writable = os.access(Path.cwd(), os.W_OK)
    text = f"{Path.cwd()}: {kind or 'unknown'}{note}, {free / 1e9:.1f} GB free"
    unwritable = f"{Path.cwd()} is not writable: give a writable folder (--run-dir)"
    return Check("run directory", text if writable else unwritable, writable)


def clock() -> Check:
    """Check that the resolution of the monotonic clock is fine enough to order operations."""
    resolution = time.clock_getres(time.CLOCK_MONOTONIC)
    wall = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    return Check("clock", f"monotonic to {resolution * 1e9:.0f} ns; wall {wall}", resolution < 1e-4)


def pidfd() -> Check:
    """Check that pidfds (file descriptors that refer to processes) are available."""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (OSError, AttributeError) as err:
        return Check("pidfd", f"not permitted ({err}); pid and start time are used instead")
    return Check("pidfd", "works")


def memfd() -> Check:
    """Check that anonymous shared memory (memfd) is available."""
    try:
        os.close(os.memfd_create("echelon-doctor"))
    except (OSError, AttributeError) as err:
        return Check("memfd", f"not permitted ({err}); unlinked files in {_SHM} are used instead")
    return Check("memfd", "works")


def proc() -> Check:
    """Check that this process can read the /proc files that verdicts are based on."""
    denied = sample(os.getpid()).not_permitted
    if denied:
        return Check(
            "/proc", f"not permitted: {', '.join(denied)}; verdicts will lack this evidence"
        )
    return Check("/proc", "process state, wait channel and signals can be read")


def stacks() -> Check:
    """Report how the ranks' stacks can be read."""
    first = getattr(signal, "SIGRTMIN", None)
    if first is None or not hasattr(faulthandler, "register"):
        asked = "this platform has no real-time signals: verdicts will lack stacks"
    else:
        asked = f"requested by signal {int(first) + 6}"
    if can_spy():
        return Check("stacks", f"read from outside by py-spy; if that is denied, {asked}")
    return Check("stacks", f"{asked}, which may end a hang; with py-spy they are read from outside")


def way_to(endpoint: str) -> Check:
    """Check that an endpoint can be reached from this machine."""
    try:
        host, port = split(endpoint)
        start = time.perf_counter()
        with socket.create_connection((host, port), timeout=_CONNECT_S):
            took_ms = (time.perf_counter() - start) * 1e3
    except ValueError as err:
        return Check("endpoint", str(err), False)
    except OSError as err:
        return Check("endpoint", f"{endpoint}: {err.strerror or err}", False)
    return Check("endpoint", f"{endpoint} answers in {took_ms:.1f} ms")


def backends() -> list[str]:
    """Return one line per backend: its name, then `ready` or `not ready: REASON`."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", "echelon.dist.backends", "--json"],
            capture_output=True, text=True, timeout=_BACKENDS_S, check=True,
        )  # fmt: skip
        found = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as err:
        return [f"backends not ready: the check failed ({type(err).__name__})"]
    return [
        f"{one['name']} {'ready' if one['ready'] else 'not ready: ' + one['reason']}"
        + (f" ({one['versions']})" if one["versions"] else "")
        for one in found
    ]
