"""What a reader found torn or damaged: counted, and said once each."""

from __future__ import annotations

from collections import Counter


class Damage:
    """The findings about one ring."""

    def __init__(self) -> None:
        self.num_torn = 0  # may be whole in a copy made a moment later
        self._warnings: Counter[str] = Counter()

    def warn(self, text: str) -> None:
        """Note what another copy of the ring would not change."""
        self._warnings[text] += 1

    def note_torn(self, count: int, what: str) -> None:
        """Note `count` things that were being written or are damaged; none is not a finding."""
        if count:
            self.num_torn += count
            self.warn(f"{count} {what}")

    def note_unreadable(self, text: str) -> None:
        """Note one thing that cannot be read: damaged, or younger than the copy of it."""
        self.num_torn += 1
        self.warn(text)

    def warnings(self) -> list[str]:
        """Return each warning once, with how often it occurred."""
        return [
            text if count == 1 else f"{text} ({count} times)"
            for text, count in self._warnings.items()
        ]
