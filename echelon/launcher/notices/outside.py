"""Send notices and metrics from the hosting node, on separate threads.

Text from these threads is printed by the launcher's main thread, after it has handled the job's
next event.
"""

from __future__ import annotations

import os
import queue
import socket
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from echelon import __version__
from echelon.launcher.coordinator import observers as o
from echelon.launcher.goodput.book import Book
from echelon.launcher.notices.notice import Notices

if TYPE_CHECKING:  # loaded only where they are asked for
    from echelon.launcher.notices.delivery import Delivery
    from echelon.launcher.notices.exporter import Exporter
    from echelon.launcher.notices.otlp.feed import Feed

CLOSE_S = 10.0  # for notices that are waiting at the job's end


class Outside:
    """An observer that sends the notices and serves the metrics of one job.

    Args:
        notify: the commands and URLs that receive notices.
        metrics: the (address, port) at which metrics are served; None if they are not served.
        otlp: the OTLP collector that receives metrics and notices: a URL, "env", or "" for none.
        run_dir: the run directory, as shown to the user.
        say: a function that prints a line. It is called only on the launcher's main thread.
    """

    def __init__(
        self,
        notify: Sequence[str],
        metrics: tuple[str, int] | None,
        otlp: str,
        run_dir: str,
        book: Book,
        say: Callable[[str], None],
    ) -> None:
        self._say = say
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._notices = Notices(book.job.job_id, run_dir, socket.gethostname())
        self._deliveries = [self._deliver(one) for one in notify]
        self._exporter = None if metrics is None else self._export(*metrics, book)
        self._feed = self._start_feed(otlp, run_dir, book) if otlp else None

    def __call__(self, happening: o.Happening) -> None:
        """Queue a notice if the event needs one."""
        receivers: list[Delivery | Feed] = [*self._deliveries]
        if self._feed is not None:
            receivers.append(self._feed)
        notice = self._notices.of(happening) if receivers else None
        if notice is not None:
            for receiver in receivers:
                receiver.send(notice)
        self._print()

    def close(self) -> None:
        """Send the queued notices, and stop serving metrics. Takes at most about 10 s."""
        deadline_s = time.monotonic() + CLOSE_S
        for delivery in self._deliveries:
            delivery.close(max(0.1, deadline_s - time.monotonic()))
        if self._feed is not None:
            self._feed.close(max(0.1, deadline_s - time.monotonic()))
        if self._exporter is not None:
            self._exporter.close()
        self._print()

    def _deliver(self, receiver: str) -> Delivery:
        from echelon.launcher.notices.delivery import Delivery

        return Delivery(receiver, self._lines.put)

    def _export(self, address: str, port: int, book: Book) -> Exporter | None:
        from echelon.launcher.notices.exporter import Exporter
        from echelon.launcher.notices.metrics import as_metrics

        try:
            exporter = Exporter(address, port, lambda: as_metrics(book.snapshot()))
        except OSError as err:
            self._say(f"no metrics at {address} port {port}: {err.strerror or err}")
            return None
        self._say(f"metrics at {exporter.url}")
        return exporter

    def _start_feed(self, endpoint: str, run_dir: str, book: Book) -> Feed | None:
        from echelon.launcher.notices.otlp.feed import Feed, why_not

        if why := why_not(endpoint, os.environ):
            self._say(why)
            return None
        resource = {
            "service.version": __version__,
            "host.name": socket.gethostname(),
            "echelon.job_id": book.job.job_id,
            "echelon.run_dir": run_dir,
        }
        try:
            return Feed(endpoint, resource, book.snapshot, self._lines.put)
        except OSError as err:
            self._say(f"--otlp has no effect: cannot start a process: {err.strerror or err}")
            return None

    def _print(self) -> None:
        while not self._lines.empty():
            self._say(self._lines.get())
