"""Serve a job's metrics over HTTP at /metrics on the hosting node."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer

from echelon import __version__
from echelon.launcher.control.endpoint import join
from echelon.launcher.notices.metrics import CONTENT_TYPE

_IDLE_S = 10.0  # a client that sends nothing is disconnected


class Exporter:
    """An HTTP server that serves text at /metrics until it is closed.

    Args:
        address: the address to bind. An IPv6 address is given without brackets.
        port: the port; 0 means any free port.
        text: a function that returns the text to serve. It is called on the server's own threads.

    Raises:
        OSError: the address cannot be bound.
    """

    def __init__(self, address: str, port: int, text: Callable[[], str]) -> None:
        class _Server(ThreadingHTTPServer):
            address_family = socket.AF_INET6 if ":" in address else socket.AF_INET
            daemon_threads = True
            block_on_close = False  # a client that hangs must not hold up the job's end

            def server_bind(self) -> None:
                """Bind without looking up this host's name, because the lookup can hang."""
                TCPServer.server_bind(self)
                self.server_name, self.server_port = address, self.server_address[1]

            def handle_error(self, request: object, client_address: object) -> None:
                """Ignore an error in handling a request, such as a client's disconnection."""

        class _Handler(_Metrics):
            make = staticmethod(text)

        self._server = _Server((address, port), _Handler)
        self.url = f"http://{join(address, self._server.server_address[1])}/metrics"
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.1,), name="echelon-metrics", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()


class _Metrics(BaseHTTPRequestHandler):
    server_version = f"echelon/{__version__}"
    sys_version = ""
    timeout = _IDLE_S
    make: Callable[[], str]

    def do_GET(self) -> None:
        if self.path.partition("?")[0] != "/metrics":
            self.send_error(HTTPStatus.NOT_FOUND)
            return
        body = self.make().encode()
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", CONTENT_TYPE)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Do not log requests."""
