"""Count the torn and damaged items in a ring, and report each kind once."""

from __future__ import annotations

from collections import Counter


class Damage:
    """The damage that was found in one ring."""

    def __init__(self) -> None:
        self.num_torn = 0  # may be whole in a copy made a moment later
        self._warnings: Counter[str] = Counter()

    def warn(self, text: str) -> None:
        """Record damage in the ring itself, which a new copy of the ring would also contain."""
        self._warnings[text] += 1

    def note_torn(self, count: int, what: str) -> None:
        """Record that `count` items, described by `what`, were incomplete or damaged."""
        if count:
            self.num_torn += count
            self.warn(f"{count} {what}")

    def note_unreadable(self, text: str) -> None:
        """Record an item that cannot be read in this copy of the ring."""
        self.num_torn += 1
        self.warn(text)

    def warnings(self) -> list[str]:
        """Return each distinct warning with its number of occurrences."""
        return [
            text if count == 1 else f"{text} ({count} times)"
            for text, count in self._warnings.items()
        ]
