"""Descriptors pass from rank 0 to the others, however long one of them takes."""

from __future__ import annotations

import os
import socket
import threading
import time

from echelon.dist.backends.shm import handover


def test_a_rank_that_is_slow_after_connecting_is_served_and_holds_up_no_other(monkeypatch):
    monkeypatch.setattr(handover, "_STRANGER_S", 0.05)
    server, ends = handover.Handover(), []
    reading, writing = os.pipe()
    deadline_s = time.monotonic() + 20
    thread = threading.Thread(
        target=lambda: ends.append(server.serve(writing, {1, 2}, deadline_s, lambda: None))
    )
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as slow:
            slow.connect(f"\0{server.name}")
            thread.start()
            fd, _ = handover.receive(server.name, 2, deadline_s, lambda: None)
            os.close(fd)
            threading.Event().wait(0.2)  # longer than a silent peer was listened to
            socket.send_fds(slow, [handover._GROUP_RANK.pack(1)], [])
            slow.settimeout(20)
            _, (fd,), _, _ = socket.recv_fds(slow, 2, 1)
            os.write(fd, b"x")
            os.close(fd)
        thread.join(20)
        assert ends == [(set(), {})]
        assert os.read(reading, 1) == b"x"
    finally:
        server.close()
        os.close(reading)
        os.close(writing)
