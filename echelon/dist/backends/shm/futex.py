"""Sleep on a word in shared memory, and wake threads that sleep on a word, with futex(2).

The C library has no futex wrapper, so ctypes makes the system call. The GIL is released during the
call.
"""

from __future__ import annotations

import ctypes
import platform
from typing import Protocol

_NUMBERS = {"x86_64": 202, "aarch64": 98, "riscv64": 98, "ppc64le": 221, "s390x": 238}
_WAIT, _WAKE = 0, 1
_EVERYONE = 0x7FFFFFFF

_number = _NUMBERS.get(platform.machine(), 0)
_syscall = ctypes.CDLL(None, use_errno=True).syscall if _number else None

# Total store order: a plain store is seen by others after the stores before it.
STORES_STAY_IN_ORDER = platform.machine() == "x86_64"


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def available() -> bool:
    """Return whether the futex system call's number on this machine is known."""
    return _syscall is not None


def wait(address: int, expected: int, timeout_s: float) -> None:
    """Sleep for at most `timeout_s` seconds while the u32 at `address` equals `expected`.

    The call can return early.
    """
    assert _syscall is not None
    limit = _Timespec(int(timeout_s), int(timeout_s % 1 * 1e9))
    _syscall(
        ctypes.c_long(_number),
        ctypes.c_void_p(address),
        ctypes.c_int(_WAIT),
        ctypes.c_uint32(expected),
        ctypes.byref(limit),
        None,
        ctypes.c_uint32(0),
    )


def wake(address: int) -> None:
    """Execute a full memory barrier, then wake all threads that sleep on the u32 at `address`.

    The kernel does both.
    """
    assert _syscall is not None
    _syscall(
        ctypes.c_long(_number),
        ctypes.c_void_p(address),
        ctypes.c_int(_WAKE),
        ctypes.c_int(_EVERYONE),
        None,
        None,
        ctypes.c_uint32(0),
    )


class Words(Protocol):
    """Shared memory viewed as u32 words."""

    words: memoryview[int]

    def address(self, word: int) -> int:
        """Return a word's address in this process's address space."""


def publish(shared: Words, word: int, value: int, wakes: bool) -> None:
    """Store a value in a word so that other processes see it only after all earlier stores.

    If `wakes` is True, wake the threads that sleep on the word.
    """
    address = shared.address(word)
    if not STORES_STAY_IN_ORDER:
        wake(address)  # for its barrier: the data must be seen before the word
    shared.words[word] = value
    if wakes:
        wake(address)
