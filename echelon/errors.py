"""The hierarchy of errors that echelon raises.

    EchelonError
    ├── StoreError                  a store operation failed
    │   ├── StoreTimeoutError       ... its deadline passed (also a TimeoutError)
    │   ├── StoreConnectionError    ... the server cannot be reached (also a ConnectionError)
    │   └── StoreProtocolError      ... the peer violated the protocol, or exceeded a limit
    ├── CollectiveError             an operation of a process group failed; carries `.ranks`
    │   ├── CollectiveMismatchError ... ranks called different operations under one number
    │   ├── CollectiveTimeoutError  ... some ranks did not join in time (also a TimeoutError)
    │   └── PeerLostError           ... a rank died or left
    ├── CheckpointError             a checkpoint cannot be saved or loaded; carries `.path`
    ├── TokenShardsError            token shards cannot be read or written; carries `.path`
    ├── NonFiniteGradientError      several steps had infinite or NaN gradients; carries `.rank`
    ├── NotReproducibleError        recomputing a micro-batch changed its bits; carries `.ranks`
    ├── DumpFormatError             a ring or dump file cannot be read; carries `.path`
    └── LaunchError                 a job cannot be started as requested

The type of an exception depends on what is at fault. A caller's mistake raises a `ValueError` or
`TypeError`, a failure of the environment raises one of these errors, and a bug in echelon raises an
`AssertionError`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


class EchelonError(Exception):
    """The base class of all errors that echelon raises, except those for programming errors.

    Example:
        >>> try:
        ...     load("runs/gone", {"step": 0})
        ... except EchelonError as err:  # catches every error in this module
        ...     print(type(err).__name__)
        CheckpointError
    """


class StoreError(EchelonError):
    """A store operation failed.

    Attributes:
        key: the operation's key, or the first of several keys; None for an operation without keys.
        endpoint: "host:port" of the server, or the path of a file store.

    Example:
        >>> try:
        ...     FileStore("no_such_folder/store")
        ... except StoreError as err:
        ...     print(err.endpoint)
        no_such_folder/store
    """

    def __init__(self, message: str, *, key: str | None = None, endpoint: str = "") -> None:
        super().__init__(message)
        self.key = key
        self.endpoint = endpoint


class StoreTimeoutError(StoreError, TimeoutError):
    """A store operation's deadline passed.

    Attributes:
        missing: the keys that were not set, or the ranks that did not arrive.

    Example:
        >>> try:
        ...     MemoryStore().wait(["rank_0", "rank_1"], timeout=0.01)
        ... except StoreTimeoutError as err:
        ...     print(err.missing)
        ('rank_0', 'rank_1')
    """

    def __init__(
        self,
        message: str,
        *,
        key: str | None = None,
        endpoint: str = "",
        missing: Sequence[str | int] = (),
    ) -> None:
        super().__init__(message, key=key, endpoint=endpoint)
        self.missing = tuple(missing)


class StoreConnectionError(StoreError, ConnectionError):
    """The server cannot be reached, or the connection to it was lost.

    Example:
        >>> client = TCPStore("127.0.0.1", server.port)
        >>> server.close()
        >>> try:
        ...     client.get("key")
        ... except StoreConnectionError as err:
        ...     print(err.endpoint.split(":")[0])
        127.0.0.1
    """


class StoreProtocolError(StoreError):
    """The peer violated the store's protocol or exceeded one of its limits.

    Example:
        >>> issubclass(StoreProtocolError, StoreError)  # the connection has been closed
        True
    """


class CollectiveError(EchelonError):
    """An operation of a process group failed.

    Attributes:
        group: the group's name.
        operation: the operation's name, such as "all_reduce".
        sequence: the operation's sequence number in its group, from 0; -1 if it is unknown.
        ranks: the global ranks that deviated from the others, were missing or were lost.

    Example:
        >>> world = dist.init()  # on each of 2 ranks
        >>> values = np.ones(4, np.float32)
        >>> try:
        ...     world.all_reduce(values) if world.rank == 0 else world.broadcast(values, root=0)
        ... except CollectiveError as err:
        ...     print(type(err).__name__, err.group, err.sequence)
        CollectiveMismatchError world 0
    """

    def __init__(
        self,
        message: str,
        *,
        group: str = "",
        operation: str = "",
        sequence: int = -1,
        ranks: Sequence[int] = (),
    ) -> None:
        super().__init__(message)
        self.group = group
        self.operation = operation
        self.sequence = sequence
        self.ranks = tuple(ranks)


class CollectiveMismatchError(CollectiveError):
    """Ranks called different operations with the same sequence number in one group.

    Example:
        >>> world = dist.init()  # on each of 2 ranks
        >>> values = np.ones(4 + world.rank, np.float32)  # 4 on rank 0, 5 on rank 1
        >>> try:
        ...     world.all_reduce(values)
        ... except CollectiveMismatchError as err:
        ...     print(err.group, err.operation, err.sequence)
        world all_reduce 0
    """


class CollectiveTimeoutError(CollectiveError, TimeoutError):
    """Some ranks did not join an operation within its timeout.

    Example:
        >>> world = dist.init()  # on each of 2 ranks
        >>> group = dist.new_group([0, 1])
        >>> missing = None
        >>> try:
        ...     if world.rank == 0:
        ...         group.barrier(timeout_s=0.2)  # rank 1 does not call it
        ... except CollectiveTimeoutError as err:
        ...     missing = err.ranks
        >>> world.barrier()
        >>> missing == ((1,) if world.rank == 0 else None)
        True
    """


class PeerLostError(CollectiveError):
    """A rank of the group died or left while other ranks needed it.

    Example:
        >>> world = dist.init()  # on each of 2 ranks
        >>> lost = None
        >>> try:
        ...     if world.rank == 1:
        ...         dist.shutdown()  # or it is killed
        ...     else:
        ...         world.barrier()
        ... except PeerLostError as err:
        ...     lost = err.ranks
        >>> lost == ((1,) if dist.is_initialized() else None)
        True
    """


class DumpFormatError(EchelonError):
    """A ring or dump file cannot be read.

    Attributes:
        path: the file.

    Example:
        >>> _ = Path("rank_0").write_bytes(b"not a ring")
        >>> try:
        ...     analyze(".")
        ... except DumpFormatError as err:
        ...     print(err.path)
        rank_0
    """

    def __init__(self, message: str, *, path: str | Path) -> None:
        super().__init__(message)
        self.path = str(path)


class CheckpointError(EchelonError):
    """A checkpoint cannot be saved or loaded.

    Attributes:
        path: the file or folder; "" if the error does not concern a file or folder.

    Example:
        >>> try:
        ...     load("runs/no_such_run", {})
        ... except CheckpointError as err:
        ...     print(err.path)
        runs/no_such_run
    """

    def __init__(self, message: str, *, path: str | Path = "") -> None:
        super().__init__(message)
        self.path = str(path)


class TokenShardsError(EchelonError):
    """Token shards cannot be read or written.

    Attributes:
        path: the file or folder.

    Example:
        >>> try:
        ...     TokenShards("no_such_folder")
        ... except TokenShardsError as err:
        ...     print(err.path)
        no_such_folder
    """

    def __init__(self, message: str, *, path: Path) -> None:
        super().__init__(message)
        self.path = path


class NonFiniteGradientError(EchelonError):
    """Several consecutive steps had infinite or NaN gradients.

    Attributes:
        rank: the lowest rank with such a gradient; None if it is unknown.
        parameter: the name of a parameter that has such a gradient on that rank.

    Example:
        >>> guard = FiniteGuard(model, max_in_a_row=1)
        >>> (model(tokens).sum() * float("nan")).backward()
        >>> try:
        ...     guard.clip_grad_norm_(1.0)
        ... except NonFiniteGradientError as err:
        ...     print(err.rank, err.parameter)
        0 token.weight
    """

    def __init__(self, message: str, *, rank: int | None, parameter: str | None) -> None:
        super().__init__(message)
        self.rank = rank
        self.parameter = parameter


class NotReproducibleError(EchelonError):
    """A micro-batch's results changed bitwise when it was recomputed or computed on another rank.

    Attributes:
        ranks: the global ranks whose results differ.

    Example:
        >>> error = NotReproducibleError("micro-batch 3 gave different bits", ranks=(1,))
        >>> error.ranks
        (1,)
    """

    def __init__(self, message: str, *, ranks: Sequence[int]) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


class LaunchError(EchelonError):
    """A job cannot be started as requested.

    Example:
        >>> issubclass(LaunchError, EchelonError)  # `echelon run` prints it and exits with code 2
        True
    """
