"""Delay the next world until the ranks of lost nodes are certain to have ended.

If the connection to a node breaks, the host tries to connect to the node's launcher. If the machine
refuses the connection, the launcher has exited, and its guard has killed its ranks. If the machine
does not answer, the ranks might continue to run until the node's permit to run them expires.
"""

from __future__ import annotations

import socket
import threading

from echelon.launcher.control.endpoint import split
from echelon.launcher.election.office import KILL_S

_PROBE_S = 1.0


class Fences:
    """The fences of one host. All times are on the clock of `lease.now_s`.

    A fence is a time before which the next world must not begin, because ranks of the former world
    might still be running.
    """

    def __init__(self) -> None:
        self._until_s: dict[str, float] = {}
        self._dead: set[str] = set()

    def wait_until(self, name: str, moment_s: float) -> None:
        """Add or extend the fence `name`: the next world must not begin before `moment_s`."""
        self._until_s[name] = max(moment_s, self._until_s.get(name, moment_s))

    def lose(self, name: str, endpoint: str, permit_ends_s: float, now_s: float) -> None:
        """Fence a lost node, and check in the background whether its launcher has exited.

        Args:
            name: the node's name.
            endpoint: the "host:port" of the node's launcher; "" if unknown.
            permit_ends_s: the time until which the node's ranks are allowed to run.
        """
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
        """Return the time before which the next world must not begin."""
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
