"""Parse the values of `echelon run`'s options. Every error message is a single line."""

from __future__ import annotations

import argparse
import os
import signal
from collections.abc import Callable
from typing import TypeVar
from urllib.parse import urlsplit

from echelon.host.accelerators import num_intel, num_nvidia
from echelon.host.cgroup import usable_cores

_T = TypeVar("_T")
_MAX_LOCAL_RANKS = 4096
_MAX_PORT = 65535
_NOT_CATCHABLE = frozenset({signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD})


def num_workers(text: str) -> int:
    """Parse the number of workers, given as a number, `auto`, or the device type to count."""
    counts: dict[str, Callable[[], int]] = {
        "cpu": usable_cores,
        "gpu": lambda: num_nvidia(os.environ),
        "xpu": num_intel,
    }
    if text == "auto":
        return counts["gpu"]() or counts["xpu"]() or counts["cpu"]()
    try:
        number = counts[text]() if text in counts else int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"expected a number, 'auto', 'cpu', 'gpu' or 'xpu', got {text!r}"
        ) from None
    if text in counts and not number:
        makers = {"gpu": "NVIDIA", "xpu": "Intel"}
        raise argparse.ArgumentTypeError(
            f"{text!r} requires an {makers[text]} GPU, but this machine has none"
        )
    if not 1 <= number <= _MAX_LOCAL_RANKS:
        raise argparse.ArgumentTypeError(f"must be from 1 to {_MAX_LOCAL_RANKS}, got {number}")
    return number


def signals(text: str) -> tuple[signal.Signals, ...]:
    """Parse signal names such as `SIGTERM,SIGINT`."""
    found = []
    for name in filter(None, (part.strip() for part in text.split(","))):
        try:
            number = signal.Signals[name]
        except KeyError:
            raise argparse.ArgumentTypeError(f"unknown signal {name!r}") from None
        if number in _NOT_CATCHABLE:
            raise argparse.ArgumentTypeError(f"signal {name} cannot be caught")
        found.append(number)
    return tuple(dict.fromkeys(found))


def torch_backend(text: str) -> str:
    """Parse the name of the backend that replaces gloo: "echelon", or "" for none."""
    if text not in ("", "echelon"):
        raise argparse.ArgumentTypeError(f"gloo can only be replaced by 'echelon', got {text!r}")
    return text


def not_negative(text: str) -> int:
    """Parse a non-negative integer."""
    try:
        number = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected an integer, got {text!r}") from None
    if number < 0:
        raise argparse.ArgumentTypeError(f"must be at least 0, got {number}")
    return number


def positive(text: str) -> int:
    """Parse an integer that is at least 1."""
    number = whole(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {number}")
    return number


def seconds(text: str) -> float:
    """Parse a positive and finite duration in seconds."""
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a number of seconds, got {text!r}") from None
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be finite and above 0, got {text}")
    return value


def reader(parse: Callable[[str], _T]) -> Callable[[str], _T]:
    """Wrap a parser so that argparse shows the parser's ValueError unchanged."""

    def read(text: str) -> _T:
        try:
            return parse(text)
        except ValueError as err:
            raise argparse.ArgumentTypeError(str(err)) from None

    return read


def min_max(text: str) -> tuple[int, int]:
    """Parse a range given as `MIN` or `MIN:MAX`; `MIN` alone means `MIN:MIN`."""
    low, _, high = text.partition(":")
    try:
        least, most = int(low), int(high or low)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected MIN or MIN:MAX, got {text!r}") from None
    if not 1 <= least <= most:
        raise argparse.ArgumentTypeError(f"expected 1 <= MIN <= MAX, got {text}")
    return least, most


def settings(text: str) -> dict[str, str]:
    """Parse the value of `--rdzv-conf`, which has the form NAME=VALUE,..."""
    found: dict[str, str] = {}
    for pair in text.split(",") if text else []:
        name, equals, value = pair.partition("=")
        if not equals or not name.strip():
            raise argparse.ArgumentTypeError(f"expected NAME=VALUE, got {pair!r}")
        found[name.strip()] = value.strip()
    return found


def whole(text: str) -> int:
    """Parse an integer."""
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected an integer, got {text!r}") from None


def receiver(text: str) -> str:
    """Check a notification target: a shell command, or a URL with a host."""
    if not text.strip():
        raise argparse.ArgumentTypeError("expected a command or a URL")
    if _is_web(text):
        _check_host(text)
    return text


def collector(text: str) -> str:
    """Check the endpoint of a collector: a URL with a host, "env", or "" for none."""
    if text in ("", "env"):
        return text
    if not _is_web(text):
        raise argparse.ArgumentTypeError(
            f"expected an http:// or https:// URL or 'env', got {text!r}"
        )
    _check_host(text)
    return text


def _is_web(text: str) -> bool:
    return text.lower().startswith(("http://", "https://"))


def _check_host(url: str) -> None:
    try:
        has_host = bool(urlsplit(url).hostname)
    except ValueError:
        has_host = False
    if not has_host or any(char.isspace() for char in url):
        raise argparse.ArgumentTypeError("the URL lacks a host or contains a space")


def listen_at(text: str) -> tuple[str, int]:
    """Parse `[ADDRESS:]PORT`; the default address is 127.0.0.1."""
    address, _, port = text.rpartition(":")
    if not port.isascii() or not port.isdecimal() or int(port) > _MAX_PORT:
        raise argparse.ArgumentTypeError(f"expected [ADDRESS:]PORT, got {text!r}")
    return address.removeprefix("[").removesuffix("]") or "127.0.0.1", int(port)
