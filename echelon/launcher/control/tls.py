"""Secure the control plane with TLS, using the user's certificates.

TLS encrypts the messages and lets a node authenticate the host. The host needs a certificate. If
the host also has a CA certificate, every node must present a certificate too.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from echelon.launcher.control.endpoint import Rendezvous

if TYPE_CHECKING:
    import grpc


@dataclass(frozen=True, kw_only=True, slots=True)
class TlsFiles:
    """The contents of the PEM files; None for a file that was not given."""

    cert: bytes | None
    key: bytes | None = field(repr=False)
    ca: bytes | None

    def for_server(self) -> grpc.ServerCredentials:
        """Return the gRPC credentials of the hosting node."""
        import grpc

        assert self.cert is not None
        assert self.key is not None
        return grpc.ssl_server_credentials(
            [(self.key, self.cert)], self.ca, require_client_auth=self.ca is not None
        )

    def for_client(self) -> grpc.ChannelCredentials:
        """Return the gRPC credentials of a node.

        Without a CA file, the node trusts the system's CAs.
        """
        import grpc

        return grpc.ssl_channel_credentials(self.ca, self.key, self.cert)


def tls_files(args: argparse.Namespace, meeting: Rendezvous | None) -> TlsFiles | None:
    """Read the certificate files given on the command line; return None if none are given.

    Raises:
        ValueError: a required file was not given, or a file cannot be read or is not a PEM file.
    """
    found: dict[str, bytes | None] = {}
    for name in ("cert", "key", "ca"):
        path = getattr(args, f"rdzv_{name}")
        try:
            found[name] = None if path is None else path.read_bytes()
        except OSError as err:
            raise ValueError(f"--rdzv-{name} {path}: {err.strerror}") from None
        if found[name] is not None and b"-----BEGIN" not in (found[name] or b""):
            raise ValueError(f"--rdzv-{name} {path}: not a PEM file")
    if not any(found.values()):
        return None
    if (found["cert"] is None) != (found["key"] is None):
        raise ValueError("--rdzv-cert and --rdzv-key must be given together")
    if meeting is not None and meeting.is_host and found["cert"] is None:
        raise ValueError("the hosting node needs --rdzv-cert and --rdzv-key for TLS")
    return TlsFiles(**found)
