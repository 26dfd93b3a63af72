"""Parse arguments, reporting a mistake with one clear line and exit code 2."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import NoReturn


class OneLineParser(argparse.ArgumentParser):
    """An argument parser whose errors do not repeat the usage text."""

    def error(self, message: str) -> NoReturn:
        """Print the error as one line and exit with code 2."""
        one_line = " ".join(message.split())
        self.exit(2, f"{self.prog}: error: {one_line}\n")


def whole_number(minimum: int) -> Callable[[str], int]:
    """Return a function that parses an integer of at least `minimum`."""

    def read(text: str) -> int:
        if text.strip().lstrip("+-").isdecimal() and int(text) >= minimum:
            return int(text)
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {minimum} up")

    return read


def positive_number(text: str) -> float:
    """Parse a finite number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value
