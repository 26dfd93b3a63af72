"""Serve the live page as HTML, and the state that it shows as JSON.

On a loopback address, the server answers only requests whose Host header names a loopback host.
This check protects the page from DNS rebinding, in which a website's name resolves to this machine.
On any other address, every request needs the token in the printed URL.
"""

from __future__ import annotations

import hmac
import ipaddress
import json
import secrets
import socket
import threading
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from echelon import __version__
from echelon.launcher.control.endpoint import join
from echelon.launcher.status.web.page import page

_IDLE_S = 10.0
_EVERYWHERE = ("0.0.0.0", "::")  # noqa: S104 -- compared with, not bound
_SECURITY = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; "
    "script-src 'unsafe-inline'; connect-src 'self'; frame-ancestors 'none'",
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class PageServer:
    """An HTTP server for the live page.

    Args:
        address: the address to bind. An IPv6 address is given without brackets.
        port: the port; 0 means any free port.
        state: a function that returns the state. Only one thread of the server calls it at a time.

    Raises:
        OSError: the address cannot be bound.
    """

    def __init__(self, address: str, port: int, state: Callable[[], dict[str, Any]]) -> None:
        lock = threading.Lock()

        class _Server(ThreadingHTTPServer):
            address_family = socket.AF_INET6 if ":" in address else socket.AF_INET
            daemon_threads = True
            block_on_close = False

            def server_bind(self) -> None:
                """Bind without looking up this host's name, because the lookup can hang."""
                TCPServer.server_bind(self)
                self.server_name, self.server_port = address, self.server_address[1]

            def handle_error(self, request: object, client_address: object) -> None:
                """Ignore an error raised during a request, such as a client's disconnection."""

        def make() -> bytes:
            with lock:
                return json.dumps(state()).encode()

        self.token = "" if _is_loopback(address) else secrets.token_urlsafe(24)
        token_ = self.token

        class _Handler(_Page):
            token = token_
            make_state = staticmethod(make)

        self._server = _Server((address, port), _Handler)
        query = f"?token={self.token}" if self.token else ""
        shown = socket.gethostname() if address in _EVERYWHERE else address
        self.url = f"http://{join(shown, self._server.server_address[1])}/{query}"

    def serve(self, poll_s: float = 0.2) -> None:
        """Serve on the calling thread until `close` is called.

        After `close` is called, `serve` returns within `poll_s` seconds.
        """
        self._server.serve_forever(poll_s)

    def close(self) -> None:
        """Stop serving. Must be called on a different thread from `serve`."""
        self._server.shutdown()
        self._server.server_close()


class _Page(BaseHTTPRequestHandler):
    server_version = f"echelon/{__version__}"
    sys_version = ""
    timeout = _IDLE_S
    token: str
    make_state: Callable[[], bytes]

    def do_GET(self) -> None:
        place = urlsplit(self.path)
        given = parse_qs(place.query).get("token", [""])[0]
        if not self._is_allowed(given):
            self._answer(HTTPStatus.FORBIDDEN, "text/plain; charset=utf-8", b"forbidden\n")
        elif place.path == "/":
            self._answer(HTTPStatus.OK, "text/html; charset=utf-8", page().encode())
        elif place.path == "/state":
            self._answer(HTTPStatus.OK, "application/json", self.make_state())
        else:
            self._answer(HTTPStatus.NOT_FOUND, "text/plain; charset=utf-8", b"not found\n")

    def _is_allowed(self, given: str) -> bool:
        if self.token:
            return hmac.compare_digest(given.encode(), self.token.encode())
        try:
            host = urlsplit(f"//{self.headers.get('Host', '')}").hostname or ""
        except ValueError:
            return False
        return _is_loopback(host)

    def _answer(self, status: HTTPStatus, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        for name, value in _SECURITY.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Do not log requests."""


def _is_loopback(address: str) -> bool:
    if address == "localhost":
        return True
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False
