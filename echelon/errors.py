"""The one error tree.

    EchelonError
    ├── StoreError                  a store operation failed
    │   ├── StoreTimeoutError       ... its deadline passed (also a TimeoutError)
    │   ├── StoreConnectionError    ... the server is out of reach (also a ConnectionError)
    │   └── StoreProtocolError      ... the peer speaks something else, or broke a limit
    ├── CollectiveError             an operation of a process group failed; carries `.ranks`
    │   ├── CollectiveMismatchError ... ranks called different things under one sequence number
    │   ├── CollectiveTimeoutError  ... ranks did not come in time (also a TimeoutError)
    │   └── PeerLostError           ... a rank died or left
    ├── CheckpointError             a checkpoint cannot be saved or loaded; carries `.path`
    ├── TokenShardsError            token shards cannot be read or written; carries `.path`
    ├── NonFiniteGradientError      steps in a row had infinite or NaN gradients; carries `.rank`
    ├── NotReproducibleError        a micro-batch gave other bits again; carries `.ranks`
    ├── DumpFormatError             a ring or dump file cannot be read; carries `.path`
    └── LaunchError                 a job cannot be started as asked

The type depends on what is at fault: a caller's mistake is a `ValueError` or `TypeError` at the
public boundary, a failing world is one of these, and our own bug is an `AssertionError`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


class EchelonError(Exception):
    """Base of everything this package raises because the world failed."""


class StoreError(EchelonError):
    """A store operation failed.

    Attributes:
        key: the key (or the first of the keys) it was about, None if about none.
        endpoint: "host:port" of the server, or the path of a file store.
    """

    def __init__(self, message: str, *, key: str | None = None, endpoint: str = "") -> None:
        super().__init__(message)
        self.key = key
        self.endpoint = endpoint


class StoreTimeoutError(StoreError, TimeoutError):
    """A store operation's deadline passed.

    Attributes:
        missing: the keys that were not there, or the ranks that did not come.
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
    """The server cannot be reached, or the connection to it broke."""


class StoreProtocolError(StoreError):
    """The peer does not follow the store's protocol, or exceeded one of its limits."""


class CollectiveError(EchelonError):
    """An operation of a process group failed.

    Attributes:
        group: the group's name.
        operation: such as "all_reduce".
        sequence: the operation's number in its group, from 0.
        ranks: global ranks that the failure is about: who differs, is missing or is gone.
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
    """Ranks called different operations under the same sequence number of a group."""


class CollectiveTimeoutError(CollectiveError, TimeoutError):
    """Ranks did not join an operation within its timeout."""


class PeerLostError(CollectiveError):
    """A rank of the group died or left while others needed it."""


class DumpFormatError(EchelonError):
    """A ring or dump file cannot be read.

    Attributes:
        path: the file.
    """

    def __init__(self, message: str, *, path: str | Path) -> None:
        super().__init__(message)
        self.path = str(path)


class CheckpointError(EchelonError):
    """A checkpoint cannot be saved or loaded.

    Attributes:
        path: the file or folder; empty if it is about none.
    """

    def __init__(self, message: str, *, path: str | Path = "") -> None:
        super().__init__(message)
        self.path = str(path)


class TokenShardsError(EchelonError):
    """Token shards could not be read or written.

    Attributes:
        path: the file or folder.
    """

    def __init__(self, message: str, *, path: Path) -> None:
        super().__init__(message)
        self.path = path


class NonFiniteGradientError(EchelonError):
    """Several steps in a row had gradients that were infinite or NaN.

    Attributes:
        rank: the lowest rank that held such a gradient; None: not known.
        parameter: its name there.
    """

    def __init__(self, message: str, *, rank: int | None, parameter: str | None) -> None:
        super().__init__(message)
        self.rank = rank
        self.parameter = parameter


class NotReproducibleError(EchelonError):
    """A micro-batch gave other bits when it was computed again, or on another rank.

    Attributes:
        ranks: the ranks (global) whose bits differ.
    """

    def __init__(self, message: str, *, ranks: Sequence[int]) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


class LaunchError(EchelonError):
    """A job cannot be started as requested."""
