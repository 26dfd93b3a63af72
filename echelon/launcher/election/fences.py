"""Delay the next world until the ranks of lost nodes are certain to have ended.

If a node's connection breaks, the host probes the node's launcher. If the machine refuses the
connection, the launcher is gone, and its guard has killed its ranks. If the machine does not
answer, the ranks may run until the node's permit expires.
"""

from __future__ import annotations

import socket
import threading

from echelon.launcher.control.endpoint import split
from echelon.launcher.election.office import KILL_S

_PROBE_S = 1.0


class Fences:
    """The fences that a host has set. All times are on the clock of `lease.now_s`."""

    def __init__(self) -> None:
        self._until_s: dict[str, float] = {}
        self._dead: set[str] = set()

    def wait_until(self, name: str, moment_s: float) -> None:
        """Delay the next world until `moment_s` or later."""
        self._until_s[name] = max(moment_s, self._until_s.get(name, moment_s))

    def lose(self, name: str, endpoint: str, permit_ends_s: float, now_s: float) -> None:
        """Fence a lost node, and start checking whether its launcher is dead."""
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
        """Return the time at which the last fence ends."""
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
