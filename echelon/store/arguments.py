"""Check callers' arguments (keys, values, numbers, ranks) before anything is sent.

Invalid arguments raise ValueError or TypeError. The limits are those of torch's protocol.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

MAX_KEY_BYTES: Final = 8191  # one less than the protocol's, for the "/" that travels with a key
MAX_VALUE_BYTES: Final = 8 << 20
MAX_KEYS: Final = 131072
MAX_COMMAND_BYTES: Final = 256 << 20


def key(text: Any) -> bytes:
    """Return a key encoded as UTF-8, after checking its type and length."""
    if not isinstance(text, str):
        raise TypeError(f"key must be str, got {type(text).__name__}")
    return fitting(text.encode("utf-8", "surrogateescape"))


def fitting(raw: bytes) -> bytes:
    """Return an encoded key unchanged, or raise ValueError if it is too long."""
    if len(raw) > MAX_KEY_BYTES:
        raise ValueError(
            f"the key has {len(raw)} bytes, but the limit is {MAX_KEY_BYTES}: {raw[:40]!r}..."
        )
    return raw


def keys(texts: Sequence[str]) -> list[bytes]:
    """Return several keys encoded as UTF-8, after checking how many there are."""
    if isinstance(texts, str):
        raise TypeError(f"keys must be a list of str, got the str {texts[:40]!r}")
    if len(texts) > MAX_KEYS:
        raise ValueError(f"the call has {len(texts)} keys, but the limit is {MAX_KEYS}")
    return [key(text) for text in texts]


def together(keys: Sequence[bytes], values: Sequence[bytes] = ()) -> None:
    """Raise ValueError if the keys and values do not fit into one command."""
    size = sum(map(len, keys)) + sum(map(len, values)) + 9 * len(keys) + 8 * len(values)
    if size > MAX_COMMAND_BYTES:
        raise ValueError(f"the call is {size} bytes long, but the limit is {MAX_COMMAND_BYTES}")


def value(given: Any) -> bytes:
    """Return a value as bytes, after checking its length; text is encoded as UTF-8."""
    if isinstance(given, str):
        raw = given.encode()
    elif isinstance(given, bytes):
        raw = given
    elif isinstance(given, bytearray | memoryview):
        raw = bytes(given)
    else:
        raise TypeError(f"value must be bytes or str, got {type(given).__name__}")
    if len(raw) > MAX_VALUE_BYTES:
        raise ValueError(f"the value has {len(raw)} bytes, but the limit is {MAX_VALUE_BYTES}")
    return raw


def int64(number: int) -> int:
    """Check that an integer fits in 64 bits, and return it."""
    if not -(1 << 63) <= number < 1 << 63:
        raise ValueError(f"{number} does not fit in 64 bits")
    return int(number)


def check_place(rank: int | None, world_size: int) -> None:
    """Check that a rank is valid in a world of the given size."""
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1, got {world_size}")
    if rank is not None and not 0 <= rank < world_size:
        raise ValueError(f"rank must be from 0 to {world_size - 1}, got {rank}")
