"""Define presences: keys that exist only while their owner is alive.

On echelon's server, the key has a lease (see `leases`), which a thread of the client renews. On
every other store, a killed process leaves the key behind.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import Self


class Presence:
    """A key that stays in the store until `close` is called.

    Args:
        take_back: a function that ends the presence; called at most once.
    """

    def __init__(self, take_back: Callable[[], object]) -> None:
        self._take_back: Callable[[], object] | None = take_back

    def close(self) -> None:
        """Remove the key from the store."""
        take_back, self._take_back = self._take_back, None
        if take_back is not None:
            take_back()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
