"""Notices reach commands and URLs; a receiver that fails or hangs costs one line and no time."""

from __future__ import annotations

import json
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from echelon.launcher.notices.delivery import Delivery

NOTICE = {"format": 1, "event": "end", "exit_code": 3}


@pytest.fixture
def said():
    return []


class _Receiver:
    """An HTTP server that answers with these codes, one after the other."""

    def __init__(self, *codes: int) -> None:
        self.bodies: list[bytes] = []
        self.users: list[str | None] = []
        self.location = ""
        receiver, left = self, list(codes)

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                receiver.users.append(self.headers["Authorization"])
                receiver.bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
                self.send_response(left.pop(0) if left else 200)
                if receiver.location:
                    self.send_header("Location", receiver.location)
                self.end_headers()

            def do_GET(self):
                receiver.users.append(self.headers["Authorization"])
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://user:password@127.0.0.1:{self._server.server_address[1]}/hook?key=1"
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def receiver():
    made = []

    def make(*codes):
        made.append(_Receiver(*codes))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_a_command_gets_each_notice_on_its_stdin_in_order(tmp_path, said):
    path = tmp_path / "notices"
    delivery = Delivery(f"cat >> {path}", said.append)
    for number in range(3):
        delivery.send({"event": "restart", "number": number})
    delivery.close(60)
    lines = path.read_text().splitlines()
    assert [json.loads(line)["number"] for line in lines] == [0, 1, 2]
    assert said == []


@pytest.mark.parametrize(
    ("command", "line"),
    [
        ("exit 7", "--notify exit: the command ended with exit code 7"),
        ("true", ""),  # a command need not read
        (
            "/nonexistent/mail",
            "--notify /nonexistent/mail: the command ended with exit code 127",
        ),
    ],
)
def test_a_command_that_fails_is_one_line(command, line, said):
    delivery = Delivery(command, said.append)
    delivery.send({**NOTICE, "text": "x" * (1 << 20)})
    delivery.close(60)
    assert said == ([line] if line else [])


def test_a_command_that_hangs_is_killed_with_what_it_started(tmp_path, said):
    alive = tmp_path / "alive"
    command = f"(while :; do touch {alive}; sleep 0.01; done) & wait"
    delivery = Delivery(command, said.append, command_s=0.3)
    delivery.send(NOTICE)
    delivery.close(60)
    why = "the command was killed because it did not finish within 0.3 s"
    assert said == [f"--notify (while: {why}"]
    alive.unlink(missing_ok=True)
    time.sleep(0.1)  # its loop would have made it again
    assert not alive.exists()


def test_the_jobs_end_waits_for_a_receiver_no_longer_than_it_may(said):
    delivery = Delivery("sleep 600", said.append)
    delivery.send(NOTICE)
    began_s = time.monotonic()
    delivery.close(0.2)
    assert time.monotonic() - began_s < 60
    assert said == ["--notify sleep: not finished within 0.2 s; abandoned"]


def test_a_receiver_that_is_too_slow_loses_notices_and_holds_up_nothing(said):
    delivery = Delivery("sleep 600", said.append)
    for _ in range(70):
        delivery.send(NOTICE)
    assert said
    assert set(said) == {"--notify sleep: too slow; a notice (end) was dropped"}
    delivery.close(0.1)


def test_a_url_gets_a_post(receiver, said):
    server = receiver()
    delivery = Delivery(server.url, said.append)
    delivery.send(NOTICE)
    delivery.close(60)
    assert [json.loads(body) for body in server.bodies] == [NOTICE]
    assert server.users == ["Basic dXNlcjpwYXNzd29yZA=="]
    assert said == []


def test_a_server_that_recovers_gets_the_notice_once_accepted(receiver, said):
    server = receiver(503, 429)
    delivery = Delivery(server.url, said.append, pauses_s=(0.01, 0.01))
    delivery.send(NOTICE)
    delivery.close(60)
    assert len(server.bodies) == 3
    assert said == []


@pytest.mark.parametrize(("codes", "tries"), [((404,), 1), ((500, 500, 500, 500), 3)])
def test_a_server_that_refuses_is_one_line_without_the_urls_secrets(codes, tries, receiver, said):
    server = receiver(*codes)
    delivery = Delivery(server.url, said.append, pauses_s=(0.01, 0.01))
    delivery.send(NOTICE)
    delivery.close(60)
    assert len(server.bodies) == tries
    assert said == [f"--notify http://127.0.0.1: the server returned HTTP {codes[0]}"]


@pytest.mark.parametrize("code", [301, 302, 303, 307, 308])
def test_a_notice_and_its_password_do_not_follow_a_redirect(code, receiver, said):
    first, other = receiver(code), receiver()
    first.location = other.url
    delivery = Delivery(first.url, said.append, pauses_s=(0.0,))
    delivery.send(NOTICE)
    delivery.close(20.0)
    assert len(first.bodies) == 1
    assert other.users == []
    line = f"--notify http://127.0.0.1: the server returned HTTP {code}: redirects are not followed"
    assert said == [f"{line}; give the final URL"]


def test_a_server_that_is_not_there_is_one_line(said):
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))  # and does not listen
        url = f"http://127.0.0.1:{bound.getsockname()[1]}/"
        delivery = Delivery(url, said.append, pauses_s=(0.01,))
        delivery.send(NOTICE)
        delivery.close(60)
    (line,) = said
    assert line.startswith("--notify http://127.0.0.1: cannot connect: ")


def test_a_server_that_never_answers_is_given_up(said):
    with socket.socket() as mute:
        mute.bind(("127.0.0.1", 0))
        mute.listen()
        url = f"http://127.0.0.1:{mute.getsockname()[1]}/"
        delivery = Delivery(url, said.append, request_s=0.1, pauses_s=())
        delivery.send(NOTICE)
        delivery.close(60)
    (line,) = said
    assert line.startswith("--notify http://127.0.0.1: the request failed: ")
