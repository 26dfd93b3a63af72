"""Until when ranks of nodes that are lost may still run: no next world begins before that.

A node whose connection broke is asked whether its launcher lives: where its machine refuses a
connection to the launcher's port, the launcher is gone and its guard has killed its ranks. From a
machine that does not answer nothing is known, and its permit has to run out.
"""

from __future__ import annotations

import socket
import threading

from echelon.launcher.control.endpoint import split
from echelon.launcher.election.office import KILL_S

_PROBE_S = 1.0


class Fences:
    """The fences of one host; times are those of `lease.now_s`."""

    def __init__(self) -> None:
        self._until_s: dict[str, float] = {}
        self._dead: set[str] = set()

    def wait_until(self, name: str, moment_s: float) -> None:
        """Let no world begin before a moment."""
        self._until_s[name] = max(moment_s, self._until_s.get(name, moment_s))

    def lose(self, name: str, endpoint: str, permit_ends_s: float, now_s: float) -> None:
        """Fence a node that is lost, and find out in the background whether it is dead."""
        if permit_ends_s <= now_s:
            return
        self._dead.discard(name)
        self.wait_until(name, permit_ends_s)
        self.wait_until(f"{name} killed", now_s + KILL_S)
        if endpoint:
            threading.Thread(
                target=self._probe, args=(name, endpoint), name="echelon-fence", daemon=True
            ).start()

    def until_s(self) -> float:
        """Return when the last fence falls."""
        return max(
            (until for name, until in self._until_s.items() if name not in self._dead),
            default=float("-inf"),
        )

    def _probe(self, name: str, endpoint: str) -> None:
        try:
            socket.create_connection(split(endpoint), _PROBE_S).close()
        except ConnectionRefusedError:
            self._dead.add(name)
        except (OSError, ValueError):
            return
