"""A machine that vanishes: every packet to and from it is lost, and no goodbye arrives.

The kernel's timers are set to a second here; what the product sets is asserted in `test_faults`.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.store.peers import PATIENCE_S
from tests.support.hosts import hosts, needs_hosts, needs_wire

pytestmark = [pytest.mark.netns, pytest.mark.slow, needs_hosts, needs_wire]

_SHORT = """
import sys, threading, time
from echelon.store.wire import keepalive
keepalive._OPTIONS.update(TCP_KEEPIDLE=1, TCP_KEEPINTVL=1, TCP_KEEPCNT=1, TCP_USER_TIMEOUT=1000)
from echelon.errors import StoreError
from echelon.store import StoreServer, TCPStore
from echelon.store.client import dialer
dialer._RECONNECT_S = 0.5
"""
_SERVER = '''
def until(*expected):
    """Wait for so many connections, waits and watched keys."""
    ends = time.monotonic() + 60
    while seen() != expected:
        assert time.monotonic() < ends, seen()
        time.sleep(0.01)

def seen():
    now = server.statistics()
    return now.num_connections, now.num_waiters, now.num_watched_keys

with StoreServer(sys.argv[1], 29400) as server:
    print("up", flush=True)
    until(3, 1, 1)
    print("joined", flush=True)
    sys.stdin.readline()
    # To the watching client data is on its way, the others are idle.
    server._call(lambda hub: hub.state.set(b"/watched", b"changed"))
    until(0, 0, 0)
    print("gone", flush=True)
'''
_CLIENT = """
ended = []

def wait():
    with TCPStore(sys.argv[1], 29400, timeout=120) as store:
        try:
            store.get("never")
        except StoreError as error:
            ended.append(type(error).__name__)

waiting = threading.Thread(target=wait)
waiting.start()
idle = TCPStore(sys.argv[1], 29400, timeout=120)
watching = TCPStore(sys.argv[1], 29400, timeout=120)
watch = watching.watch(["watched"])
began = time.monotonic()
waiting.join()
print(*ended, "in time" if time.monotonic() - began < 60 else "late")
"""


def test_both_ends_notice_that_the_other_machine_is_gone():
    with hosts(2, wired={1}) as (near, far):
        started = []
        for host, script in ((near, _SERVER), (far, _CLIENT)):
            one = subprocess.Popen(
                host.command(sys.executable, "-c", _SHORT + script, near.address),
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            )  # fmt: skip
            started.append(one)
            if host is near:
                assert one.stdout.readline() == "up\n"
        server, client = started
        try:
            assert server.stdout.readline() == "joined\n"
            far.wire.loss = 1.0
            server.stdin.write("lost\n")
            server.stdin.flush()
            assert server.stdout.readline() == "gone\n"
            assert server.wait(PATIENCE_S) == 0
            said, _ = client.communicate(timeout=PATIENCE_S)
            assert said == "StoreConnectionError in time\n"
            assert client.returncode == 0
        finally:
            for one in started:
                one.kill()
                one.communicate()
