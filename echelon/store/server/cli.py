"""Run a standalone store server (`echelon store`).

The first line of output is the port number. The server runs until SIGTERM or SIGINT. If standard
input is a pipe, the server also stops when the pipe closes. With `--parent-only`, the server
ignores SIGTERM, SIGINT, SIGHUP, SIGQUIT, SIGUSR1 and SIGUSR2, and stops only when the pipe closes.

A parent process can send commands through the pipe, one per line. `admit ADDRESS` admits torch's
clients from a trusted address. `publish KEY VALUE` stores a value; KEY and VALUE are single words.
`post FOLDER VALUE` stores a value under the first of the keys FOLDER/0, FOLDER/1, ... that is free.
`has KEY ...` makes the server print `has`, followed by a 1 for each key that exists and a 0 for
each key that does not. `renew` makes the server disconnect all clients, drop all keys and print
`renew`. Any other line is ignored.
"""

from __future__ import annotations

import argparse
import os
import signal
import stat
import sys
import threading
from pathlib import Path

from echelon import __version__
from echelon.errors import EchelonError
from echelon.store.server.hub import log
from echelon.store.server.logsink import StderrSink
from echelon.store.server.server import StoreServer
from echelon.store.wire.trust import is_loopback

_PARENTS_SIGNALS = (
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
)


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code.

    The code is 1 if the server failed, and 2 if an argument or the secret file is invalid.
    """
    args = _parse(argv)
    has_parent_pipe = sys.stdin is not None and _is_pipe(0)
    if args.parent_only:
        if not has_parent_pipe:
            print("echelon store: --parent-only: standard input is not a pipe", file=sys.stderr)
            return 2
        for number in _PARENTS_SIGNALS:
            signal.signal(number, signal.SIG_IGN)
    try:
        secret = _read_secret(args.secret_file)
        server = StoreServer(args.host, args.port, secret=secret)
    except (ValueError, OSError) as error:  # an empty host or secret, a file that is not there
        print(f"echelon store: {error}", file=sys.stderr)
        return 2
    except EchelonError as error:
        print(f"echelon store: {error}", file=sys.stderr)
        return 1
    sink = StderrSink()
    log.addHandler(sink)
    if secret is None and not is_loopback(server.address):
        log.warning("store: serving %s without a secret: any client can connect", args.host)
    if has_parent_pipe:
        threading.Thread(target=_listen_to_parent, args=(server,), daemon=True).start()
    server.serve_forever(on_ready=lambda: print(server.port, flush=True))
    server.close()
    log.removeHandler(sink)
    sink.close()
    return 0


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="echelon store",
        description="Serve a key-value store that torch's and echelon's TCPStore clients can join.",
    )
    parser.add_argument("--version", action="version", version=f"echelon {__version__}")
    parser.add_argument("--host", default="127.0.0.1", help="address to bind (default %(default)s)")
    parser.add_argument("--port", type=_port, default=0, help="port, 0 for any free one (default)")
    parser.add_argument(
        "--secret-file",
        type=Path,
        help="file that holds the shared secret; without it every client that can reach "
        "the port is admitted",
    )
    parser.add_argument(
        "--parent-only",
        action="store_true",
        help="ignore signals: serve until standard input, a pipe, is closed",
    )
    return parser.parse_args(argv)


def _port(text: str) -> int:
    port = int(text) if text.isdecimal() else -1
    if not 0 <= port <= 65535:
        raise argparse.ArgumentTypeError(f"expected a port from 0 to 65535, got {text!r}")
    return port


def _read_secret(path: Path | None) -> bytes | None:
    """Return the contents of the secret file without the trailing newline."""
    if path is None:
        return None
    return path.read_bytes().rstrip(b"\r\n")


def _is_pipe(descriptor: int) -> bool:
    try:
        return stat.S_ISFIFO(os.fstat(descriptor).st_mode)
    except OSError:  # closed
        return False


def _listen_to_parent(server: StoreServer) -> None:
    """Execute the commands from standard input until it closes, then stop the server."""
    with os.fdopen(os.dup(0), encoding="utf-8", errors="replace") as lines:
        for line in lines:
            _obey(server, line.split())
    server.stop_soon()


def _obey(server: StoreServer, words: list[str]) -> None:
    try:
        if words == ["renew"]:
            server.renew()
            print("renew", flush=True)
        elif words[:1] == ["has"]:
            print("has", *map(int, server.hold(words[1:])), flush=True)
        elif len(words) == 2 and words[0] == "admit":
            server.admit(words[1])
        elif len(words) == 3 and words[0] == "publish":
            server.publish(words[1], words[2])
        elif len(words) == 3 and words[0] == "post":
            server.post(words[1], words[2])
    except (EchelonError, ValueError) as error:
        print(f"echelon store: {' '.join(words)}: {error}", file=sys.stderr)
