"""TLS for the control plane, from certificates that the user brings.

Nodes prove the job's secret in any case; certificates add that no third party can read along, and
that a node knows its host before it speaks. The host needs a certificate; where it has the
authority's too, it asks every node for one of its own.
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
    """The contents of PEM files, None for one that was not given."""

    cert: bytes | None
    key: bytes | None = field(repr=False)
    ca: bytes | None

    def for_server(self) -> grpc.ServerCredentials:
        """Return what the host serves with."""
        import grpc

        assert self.cert is not None
        assert self.key is not None
        return grpc.ssl_server_credentials(
            [(self.key, self.cert)], self.ca, require_client_auth=self.ca is not None
        )

    def for_client(self) -> grpc.ChannelCredentials:
        """Return what a node dials with; without an authority, the system's are trusted."""
        import grpc

        return grpc.ssl_channel_credentials(self.ca, self.key, self.cert)


def tls_files(args: argparse.Namespace, meeting: Rendezvous | None) -> TlsFiles | None:
    """Read the files that were named; None if none was.

    Raises:
        ValueError: one is missing, or cannot be read.
    """
    found: dict[str, bytes | None] = {}
    for name in ("cert", "key", "ca"):
        path = getattr(args, f"rdzv_{name}")
        try:
            found[name] = None if path is None else path.read_bytes()
        except OSError as err:
            raise ValueError(f"--rdzv-{name} {path}: {err.strerror}") from None
        if found[name] is not None and b"-----BEGIN" not in (found[name] or b""):
            raise ValueError(f"--rdzv-{name} {path}: is not a PEM file")
    if not any(found.values()):
        return None
    if (found["cert"] is None) != (found["key"] is None):
        raise ValueError("--rdzv-cert and --rdzv-key belong together")
    if meeting is not None and meeting.is_host and found["cert"] is None:
        raise ValueError("the hosting node needs --rdzv-cert and --rdzv-key for TLS")
    return TlsFiles(**found)
