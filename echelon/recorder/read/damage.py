"""Torn or damaged parts that a reader found, counted and reported once each."""

from __future__ import annotations

from collections import Counter


class Damage:
    """The findings about one ring."""

    def __init__(self) -> None:
        self.num_torn = 0  # may be whole in a copy made a moment later
        self._warnings: Counter[str] = Counter()

    def warn(self, text: str) -> None:
        """Note a finding that another copy of the ring would not change."""
        self._warnings[text] += 1

    def note_torn(self, count: int, what: str) -> None:
        """Note `count` items that were being written or are damaged; zero is not a finding."""
        if count:
            self.num_torn += count
            self.warn(f"{count} {what}")

    def note_unreadable(self, text: str) -> None:
        """Note one item that cannot be read: damaged, or newer than the copy of it."""
        self.num_torn += 1
        self.warn(text)

    def warnings(self) -> list[str]:
        """Return each warning once, with the number of times it occurred."""
        return [
            text if count == 1 else f"{text} ({count} times)"
            for text, count in self._warnings.items()
        ]
