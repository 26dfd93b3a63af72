"""Count the torn and damaged parts that a reader finds, and report each kind once."""

from __future__ import annotations

from collections import Counter


class Damage:
    """The damage that was found in one ring."""

    def __init__(self) -> None:
        self.num_torn = 0  # may be whole in a copy made a moment later
        self._warnings: Counter[str] = Counter()

    def warn(self, text: str) -> None:
        """Record damage that would also be present in another copy of the ring."""
        self._warnings[text] += 1

    def note_torn(self, count: int, what: str) -> None:
        """Record that `count` items, possibly 0, were being written or are damaged."""
        if count:
            self.num_torn += count
            self.warn(f"{count} {what}")

    def note_unreadable(self, text: str) -> None:
        """Record an unreadable item, which is damaged or newer than this copy of the ring."""
        self.num_torn += 1
        self.warn(text)

    def warnings(self) -> list[str]:
        """Return each distinct warning with the number of times that it occurred."""
        return [
            text if count == 1 else f"{text} ({count} times)"
            for text, count in self._warnings.items()
        ]
