"""Determine the endpoint at which a job's nodes rendezvous, and which node hosts the job.

The endpoint is the address that other nodes connect to. The host cannot always bind this address:
on Debian, for example, a machine's own name resolves to the loopback address 127.0.1.1.

A node that sets `is_host` to true is the host. By default, the host is the node with node rank 0
or, if no node ranks are given, the node that owns the endpoint's address.
"""

from __future__ import annotations

import argparse
import ipaddress
import os
import socket
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from echelon.launcher.control.conf import Conf
from echelon.store.wire.trust import MIN_SECRET_BYTES

DEFAULT_PORT = 29400
WITNESS_PORT = 29402
_LITERAL_LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Rendezvous:
    """A job's endpoint and secret, and the address to which the job's host binds."""

    host: str  # as others dial it
    port: int
    is_host: bool  # this node hosts the job
    bind: str  # what the host binds
    secret: bytes = field(repr=False)

    @property
    def address(self) -> str:
        """The endpoint as "host:port"."""
        return join(self.host, self.port)

    @property
    def stays_here(self) -> bool:
        """True if the host can be reached only from this machine."""
        return ipaddress.ip_address(self.bind).is_loopback

    @property
    def bind_address(self) -> str:
        """The address that the host binds, as "host:port"."""
        return join(self.bind, self.port)


def rendezvous(
    args: argparse.Namespace, conf: Conf, environ: Mapping[str, str]
) -> Rendezvous | None:
    """Return the rendezvous that the command line specifies, or None for a single-node job.

    Raises:
        ValueError: an option is missing or invalid, or two options contradict each other. The error
            message is a single line.
    """
    if args.standalone or args.nnodes == (1, 1):
        return None
    endpoint = args.rdzv_endpoint
    if not endpoint and args.master_addr:
        endpoint = f"{args.master_addr}:{args.master_port or DEFAULT_PORT}"
    if not endpoint:
        raise ValueError("--nnodes above 1 needs --rdzv-endpoint HOST:PORT, the same on all nodes")
    host, port = split(endpoint)
    secret = read_secret(args.rdzv_secret_file, environ)
    is_host = conf.is_host
    if is_host is None and args.node_rank >= 0:
        is_host = args.node_rank == 0
    # On Kubernetes a name may become resolvable only after its node has started. So it must be
    # resolved now only if the node needs it to find out whether it is the host.
    addresses = _resolve(host, must_exist=is_host is None)
    local = [address for address in addresses if is_local(address)]
    if is_host is None:
        is_host = bool(local)
    bind = args.bind or (local[0] if local else "0.0.0.0")  # noqa: S104 -- members prove the secret
    named_loopback = host not in _LITERAL_LOOPBACK and ipaddress.ip_address(bind).is_loopback
    if is_host and named_loopback and not args.bind:
        raise ValueError(
            f"--rdzv-endpoint {host} resolves to {bind} here, which other nodes cannot reach; "
            "give the address at which they reach this node, or --bind 0.0.0.0"
        )
    return Rendezvous(host=host, port=port, is_host=is_host, bind=bind, secret=secret)


def split(
    endpoint: str, default_port: int = DEFAULT_PORT, option: str = "--rdzv-endpoint"
) -> tuple[str, int]:
    """Split "host:port" or "[IPv6 address]:port" into host and port.

    Raises:
        ValueError: the host is empty, or the port is invalid.
    """
    host, colon, port = endpoint.rpartition(":")
    if not colon or "]" in port:
        host, port = endpoint, str(default_port)
    try:
        number = int(port)
    except ValueError:
        number = -1
    if not 0 < number < 65536 or not host:
        raise ValueError(f"{option} must be HOST:PORT, got {endpoint!r}")
    return host.strip("[]"), number


def join(host: str, port: int) -> str:
    """Join a host and a port into "host:port", with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_local(address: str) -> bool:
    """Return whether a numeric address belongs to this machine."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


def _resolve(host: str, *, must_exist: bool) -> list[str]:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except socket.gaierror as err:
        if not must_exist:
            return []
        raise ValueError(f"--rdzv-endpoint: cannot resolve {host!r}: {err.strerror}") from None
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


def read_secret(path: Path | None, environ: Mapping[str, str]) -> bytes:
    """Read the job's secret from a file or the environment.

    Raises:
        ValueError: the secret is missing, too short or not text, or other users can access the
            file.
    """
    if path is None:
        secret = environ.get("ECHELON_SECRET", "").encode()
        if not secret:
            raise ValueError(
                "multi-node jobs need a shared secret: give --rdzv-secret-file FILE (mode 0600) "
                "or set ECHELON_SECRET, with the same secret on all nodes"
            )
        return _checked(secret, "ECHELON_SECRET")
    try:
        status = path.stat()
        secret = path.read_bytes().strip()
    except OSError as err:
        raise ValueError(f"--rdzv-secret-file {path}: {err.strerror}") from None
    if stat.S_IMODE(status.st_mode) & 0o077 and status.st_uid == os.getuid():
        raise ValueError(
            f"--rdzv-secret-file {path}: other users can access the file; run chmod 600 on it"
        )
    return _checked(secret, f"--rdzv-secret-file {path}")


def _checked(secret: bytes, source: str) -> bytes:
    """Return a secret after checking its length and format.

    Raises:
        ValueError: the secret is too short or is not valid UTF-8.
    """
    if len(secret) < MIN_SECRET_BYTES:
        raise ValueError(
            f"{source}: the secret has {len(secret)} bytes, but at least {MIN_SECRET_BYTES} "
            "are needed (create one with openssl rand -hex 32)"
        )
    try:
        secret.decode()
    except UnicodeDecodeError:
        raise ValueError(
            f"{source}: the secret is not valid UTF-8; create one with openssl rand -hex 32"
        ) from None
    return secret
