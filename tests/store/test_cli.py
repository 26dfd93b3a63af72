"""`echelon store`: its first line, when it stops, and what it says about bad usage."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

import echelon
from echelon.errors import StoreError
from echelon.store import TCPStore
from echelon.store.server import cli as command
from echelon.store.server import server as servers
from echelon.store.server.cli import main
from tests.store.peers import PATIENCE_S, Raw, server_process

COMMAND = [sys.executable, "-m", "echelon.store"]


def start(stdin, *arguments):
    return subprocess.Popen(
        [*COMMAND, *arguments],
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_it_prints_its_port_and_serves(closing):
    with server_process() as port:
        assert closing(TCPStore("127.0.0.1", port, timeout=20.0)).add("n", 2) == 2


def test_it_stops_when_its_parents_pipe_ends():
    server = start(subprocess.PIPE)
    assert int(server.stdout.readline()) > 0
    rest, errors = server.communicate(timeout=PATIENCE_S)
    assert (server.returncode, rest, errors) == (0, "", "")


def test_its_parent_can_publish_admit_torchs_clients_and_begin_anew(tmp_path, closing):
    secret = tmp_path / "secret"
    secret.write_text("s3cret that is long enough")
    server = start(subprocess.PIPE, "--host", "127.0.0.2", "--secret-file", str(secret))
    port = int(server.stdout.readline())
    store = closing(TCPStore("127.0.0.2", port, timeout=20.0, secret="s3cret that is long enough"))
    store.set("kept", b"x")
    server.stdin.write(
        "publish told/1 a-word\npublish told/2 two words\npost told/notes two words\n"
    )
    server.stdin.write("post told/notes first\npost told/notes second\n")
    server.stdin.flush()
    assert store.get("told/1") == b"a-word"
    assert not store.check(["told/2"])
    assert [store.get(f"told/notes/{n}") for n in range(2)] == [b"first", b"second"]
    server.stdin.write("nonsense\nadmit not-an-address\nadmit 10.9.8.7\nrenew\n")
    server.stdin.flush()
    assert server.stdout.readline() == "renew\n"
    with pytest.raises(StoreError, match=r"restarted, and its keys are lost|connection broke"):
        store.get("kept")
    fresh = closing(TCPStore("127.0.0.2", port, timeout=20.0, secret="s3cret that is long enough"))
    assert fresh.num_keys() == 0
    _, errors = server.communicate(timeout=PATIENCE_S)
    assert server.returncode == 0
    assert "admit not-an-address" in errors


@pytest.mark.parametrize("moment", ["at once", "before it serves"])
def test_a_parent_that_is_gone_before_it_serves_is_noticed(moment, tmp_path):
    """A parent may die while its server still loads."""
    if moment == "at once":
        command = COMMAND
    else:  # the end of input is seen before the loop is made
        slow = tmp_path / "slow.py"
        slow.write_text(
            "import echelon.store.server.server as s, echelon.store.server.cli as c\n"
            "import threading, sys\n"
            "seen, real, stop = threading.Event(), s._new_event_loop, s.StoreServer.stop_soon\n"
            "def note(self):\n    stop(self)\n    seen.set()\n"
            "def late():\n    assert seen.wait(20)\n    return real()\n"
            "s.StoreServer.stop_soon, s._new_event_loop = note, late\n"
            "sys.exit(c.main([]))\n"
        )
        command = [sys.executable, str(slow)]
    server = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    _, errors = server.communicate("", timeout=PATIENCE_S)
    assert (server.returncode, errors) == (0, "")


def test_with_parent_only_nothing_but_the_end_of_the_pipe_ends_it(closing):
    server = start(subprocess.PIPE, "--parent-only")
    port = int(server.stdout.readline())
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        server.send_signal(number)
    store = closing(TCPStore("127.0.0.1", port, timeout=20.0))
    assert store.add("n", 2) == 2
    rest, errors = server.communicate(timeout=PATIENCE_S)
    assert (server.returncode, rest, errors) == (0, "", "")


def test_parent_only_without_a_parent_is_one_line(capsys, monkeypatch):
    monkeypatch.setattr("echelon.store.server.cli._is_pipe", lambda _: False)
    assert main(["--parent-only"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_without_a_pipe_it_goes_on_until_a_signal(number, closing):
    server = start(subprocess.DEVNULL)
    port = int(server.stdout.readline())
    assert closing(TCPStore("127.0.0.1", port, timeout=20.0)).add("n", 1) == 1
    assert server.poll() is None
    server.send_signal(number)
    rest, errors = server.communicate(timeout=PATIENCE_S)
    assert (server.returncode, rest, errors) == (0, "", "")


def test_a_closed_standard_input_is_no_pipe():
    server = subprocess.Popen(
        ["sh", "-c", 'exec "$0" "$@" 0<&-', *COMMAND],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert int(server.stdout.readline()) > 0
    server.terminate()
    assert server.communicate(timeout=PATIENCE_S)[1] == ""
    assert server.returncode == 0


def test_a_secret_comes_from_a_file(tmp_path, closing):
    secret = tmp_path / "secret"
    secret.write_text("s3cret that is long enough\n")
    with server_process("--secret-file", str(secret)) as port:
        store = closing(
            TCPStore("127.0.0.1", port, timeout=20.0, secret="s3cret that is long enough")
        )
        assert store.add("n", 1) == 1


def test_a_port_in_use_is_one_line(server, capsys):
    assert main(["--port", str(server.port)]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "Address already in use" in error


@pytest.mark.parametrize("arguments", [["--port", "99999"], ["--port", "x"], ["--nonsense"]])
def test_bad_usage_exits_with_2(arguments, capsys):
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    assert "Traceback" not in capsys.readouterr().err


def test_strangers_do_not_stop_it_through_its_log(closing):
    """Standard error is a pipe that nobody reads."""
    server = start(subprocess.DEVNULL)
    port = int(server.stdout.readline())
    for _ in range(1500):
        stranger = closing(Raw(port, opening=b"GET / HTTP/1.1\r\n\r\n"))
        assert stranger.is_closed_by_server()
    store = closing(TCPStore("127.0.0.1", port, timeout=PATIENCE_S))
    assert store.add("n", 1) == 1
    assert store.statistics().num_refused == 1500
    server.terminate()
    errors = server.communicate(timeout=PATIENCE_S)[1]
    assert "GET" not in errors
    assert "more connections that sent invalid data" in errors
    assert errors.count("\n") < 500
    assert server.returncode == 0


def test_a_store_open_to_the_network_says_so(tmp_path):
    server = subprocess.Popen(
        [*COMMAND, "--host", "0.0.0.0"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert int(server.stdout.readline()) > 0
    server.terminate()
    assert "without a secret" in server.communicate(timeout=PATIENCE_S)[1]


def test_a_missing_secret_file_is_one_line(capsys):
    assert main(["--secret-file", os.devnull + ".none"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_it_tells_its_version(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out == f"echelon {echelon.__version__}\n"


def test_it_serves_more_connections_than_the_soft_limit_allows():
    server = subprocess.Popen(
        ["sh", "-c", 'ulimit -Sn 40 && exec "$0" "$@"', *COMMAND],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    port = int(server.stdout.readline())
    peers = [Raw(port) for _ in range(100)]
    for peer in peers:
        peer.sync()
    for peer in peers:
        peer.close()
    server.terminate()
    assert server.communicate(timeout=PATIENCE_S) == ("", "")
    assert server.returncode == 0


def test_the_loop_is_libuvs_and_a_slower_one_says_so(monkeypatch, caplog):
    uvloop = pytest.importorskip("uvloop")
    loop = servers._new_event_loop()
    loop.close()
    assert isinstance(loop, uvloop.Loop)
    monkeypatch.setitem(sys.modules, "uvloop", None)
    loop = servers._new_event_loop()
    loop.close()
    assert [record.message for record in caplog.records] == [
        "store: uvloop is not installed; serving on asyncio's slower loop"
    ]


@pytest.mark.parametrize("port", ["abc", "-1", "65536"])
def test_a_port_that_is_none_is_quoted(port, capsys):
    with pytest.raises(SystemExit) as end:
        command.main(["--port", port])
    assert end.value.code == 2
    assert f"expected a port from 0 to 65535, got '{port}'" in capsys.readouterr().err
