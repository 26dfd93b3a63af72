"""Provide a torch group that can be reconfigured with different members.

Torch's own groups are created only once. This group is configured with the address of a store, by
torchft's manager (`echelon/dist/torchft.py`) or by a program that selects the members itself. A
configuration that has failed or was aborted refuses all operations until the next configuration
replaces it.

[Note: ending a configuration] `abort` can be called while another thread is inside an operation or
inside `configure`. `abort` uses GroupMaker, which can abort a group both during and after its
creation. `abort` does not release the group, because the aborted operations must still report their
errors. The next `configure` or `shutdown` releases the group.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from echelon.dist.backends.interface import Members
from echelon.dist.errors import build
from echelon.dist.group import ProcessGroup
from echelon.dist.make_group import GroupMaker
from echelon.dist.operation.operation import Operation
from echelon.dist.options import Options
from echelon.dist.torch_backend.group import TorchGroup
from echelon.dist.torch_backend.store import observed
from echelon.errors import CollectiveError
from echelon.store import PrefixStore, TCPStore
from echelon.store.deadline import time_left_s

_EPOCH = 1  # of the end of a configuration; each has a GroupMaker of its own


class Configuration:
    """One set of members, and the factory that creates their group.

    Args:
        address: the store, as "host:port/prefix"; every configuration needs its own prefix.
        name: the group's name in errors and records.
        rank: this process's rank within the group.
        ranks: the numbers that identify the members in errors and records, in group order.
    """

    def __init__(
        self,
        address: str,
        name: str,
        rank: int,
        ranks: Sequence[int],
        timeout_s: float,
        options: Options,
    ) -> None:
        self.rank = rank
        self.size = len(ranks)
        self.timeout_s = timeout_s
        self._place = parse(address)
        self._name = name
        self._ranks = ranks
        self._options = options
        self._store: TCPStore | None = None
        self._maker: GroupMaker | None = None
        self._made: ProcessGroup | None = None
        self._error: CollectiveError | None = None
        self._lock = threading.RLock()  # a signal handler may abort

    def make(self, description: str) -> ProcessGroup:
        """Create the group; block until all members have joined."""
        deadline_s = time.monotonic() + self.timeout_s
        host, port, prefix = self._place
        self._store = TCPStore(host, port, timeout=self.timeout_s, observer=observed)
        store = PrefixStore(f"{prefix}/echelon", self._store)
        maker = GroupMaker(self._ranks[self.rank], store, None, self._options)
        maker.watch_members()
        with self._lock:
            self._maker = maker
            if self._error is not None:
                raise self._error
        left_s = time_left_s(deadline_s)
        self._made = maker.make(self._ranks, description, store, left_s)
        self._made.timeout_s = self.timeout_s
        return self._made

    def abort(self) -> None:
        """Abort the group on all its members, even if it is still being created."""
        members = Members(name=self._name, rank=self.rank, ranks=self._ranks)
        self.end(build.aborted(members, Operation("abort", 0)))

    def end(self, error: CollectiveError) -> None:
        """Abort the group with an error, even if it is still being created.

        Only the first call has an effect.
        """
        with self._lock:
            self._error = self._error or error
            maker = self._maker
        if maker is not None:
            maker.end(error, _EPOCH)

    @property
    def error(self) -> CollectiveError | None:
        """The error with which the group or its creation failed; None if neither has failed."""
        made = self._made
        if made is None:
            return self._error
        made.state.sweep()  # operations that have failed, and for which no caller has waited
        return made.state.error or self._error

    def close(self) -> None:
        """Disconnect from the store."""
        if self._store is not None:
            self._store.close()


class Reconfigurable:
    """A torch group that can be reconfigured with different members.

    Args:
        timeout_s: the timeout of `configure`, and of operations without a timeout of their own.
        options: the options of each group that `configure` creates.
    """

    def __init__(self, timeout_s: float, options: Options | None = None) -> None:
        self._timeout_s = timeout_s
        self._options = options or Options()
        self._configuration: Configuration | None = None
        self._group: TorchGroup | None = None
        self._configuring = threading.Lock()

    def configure(self, address: str, name: str, rank: int, ranks: Sequence[int]) -> None:
        """Leave the current group and join a new one; block until all its members have joined.

        Args:
            address: the store, as "host:port/prefix"; every configuration needs its own prefix.
            name: the group's name in errors and records.
            rank: this process's rank within the group.
            ranks: the numbers that identify the members in errors and records, in group order.

        Raises:
            ValueError: the address or the rank is invalid.
            StoreError: the store does not answer.
            CollectiveTimeoutError: some members did not join within the timeout.
            PeerLostError: a member died during the call.
            CollectiveError: `abort` was called during the call.
        """
        if not 0 <= rank < len(ranks):
            raise ValueError(f"rank must be from 0 to {len(ranks) - 1}, got {rank}")
        with self._configuring:
            configuration = Configuration(
                address, name, rank, ranks, self._timeout_s, self._options
            )
            self.shutdown()
            self._configuration = configuration
            group = TorchGroup(configuration, None)
            try:
                group.setGroupDesc(name)
                if configuration.error is not None:  # aborted in the last moment
                    raise configuration.error
            except BaseException as err:
                error = err if isinstance(err, CollectiveError) else _failed(name, err)
                configuration.end(error)
                group.shutdown()
                raise
            self._group = group

    @property
    def group(self) -> TorchGroup:
        """The current group.

        Raises:
            CollectiveError: no group is configured, or the group could not be created.
        """
        group = self._group
        if group is not None:
            return group
        error = self.error
        reason = f": {error}" if error is not None else "; call configure first"
        raise CollectiveError(f"the group is not configured{reason}")

    @property
    def error(self) -> CollectiveError | None:
        """The error that ended the current group or prevented its creation, or None."""
        configuration = self._configuration
        return None if configuration is None else configuration.error

    @property
    def rank(self) -> int:
        """This process's rank within the current group; 0 if there is no group."""
        return 0 if self._configuration is None else self._configuration.rank

    @property
    def size(self) -> int:
        """The number of members of the current group; 1 if there is no group."""
        return 1 if self._configuration is None else self._configuration.size

    @property
    def timeout_s(self) -> float:
        """The timeout of `configure`, and of operations without a timeout of their own."""
        return self._timeout_s

    def set_timeout(self, timeout_s: float) -> None:
        """Set the timeout of `configure` and later operations, including the current group's."""
        self._timeout_s = timeout_s
        group = self._group
        if group is not None:
            group.set_timeout_s(timeout_s)

    def abort(self) -> None:
        """Abort the current group on all its members, even if it is still being created.

        Safe to call on any thread. Waiting operations and `configure` raise CollectiveError within
        1 s.
        """
        configuration = self._configuration
        if configuration is not None:
            configuration.abort()

    def shutdown(self) -> None:
        """Leave the current group and release its resources within 2 s. Safe to call twice."""
        group, self._group = self._group, None
        configuration, self._configuration = self._configuration, None
        if group is not None:
            group.shutdown()
        elif configuration is not None:
            configuration.abort()  # another thread may be inside `configure`


def parse(address: str) -> tuple[str, int, str]:
    """Return the host, the port and the prefix of "host:port/prefix".

    Raises:
        ValueError: the address has another form.
    """
    place, _, prefix = address.partition("/")
    host, _, port = place.rpartition(":")
    if not host or not port.isdigit():
        raise ValueError(
            f"the store's address must have the form 'host:port/prefix', got {address!r}"
        )
    return host.strip("[]"), int(port), prefix


def _failed(name: str, error: BaseException) -> CollectiveError:
    made = CollectiveError(f"cannot set up group {name!r}: {error}", group=name, operation="init")
    made.__cause__ = error
    return made
