"""Send notices and serve metrics on the hosting node, on threads of their own.

Lines from these threads are printed on the launcher's thread at the next event, which usually
occurs within about a second.
"""

from __future__ import annotations

import queue
import socket
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from echelon.launcher.coordinator import observers as o
from echelon.launcher.goodput.book import Book
from echelon.launcher.notices.notice import Notices

if TYPE_CHECKING:  # loaded only where they are asked for
    from echelon.launcher.notices.delivery import Delivery
    from echelon.launcher.notices.exporter import Exporter

CLOSE_S = 10.0  # for notices that are waiting at the job's end


class Outside:
    """An observer that sends the notices and serves the metrics of one job.

    Args:
        notify: the commands and URLs that receive notices.
        metrics: the (address, port) at which metrics are served, or None.
        run_dir: the run directory, as the user knows it.
        say: a function that prints a line, called only on the caller's thread.
    """

    def __init__(
        self,
        notify: Sequence[str],
        metrics: tuple[str, int] | None,
        run_dir: str,
        book: Book,
        say: Callable[[str], None],
    ) -> None:
        self._say = say
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._notices = Notices(book.job.job_id, run_dir, socket.gethostname())
        self._deliveries = [self._deliver(one) for one in notify]
        self._exporter = None if metrics is None else self._export(*metrics, book)

    def __call__(self, happening: o.Happening) -> None:
        """Queue a notice if the event needs one."""
        notice = self._notices.of(happening) if self._deliveries else None
        if notice is not None:
            for delivery in self._deliveries:
                delivery.send(notice)
        self._print()

    def close(self) -> None:
        """Deliver the waiting notices, for at most 10 s, and stop serving metrics."""
        deadline_s = time.monotonic() + CLOSE_S
        for delivery in self._deliveries:
            delivery.close(max(0.1, deadline_s - time.monotonic()))
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

    def _print(self) -> None:
        while not self._lines.empty():
            self._say(self._lines.get())
