"""oneCCL's C library: found inside the environment, loaded with what it needs, called by ctypes.

The wheel (`oneccl`, and the runtime packages it depends on) puts its libraries into the
environment's `lib` folder, where the loader does not look. So each library that the loader misses
is loaded from there first, by its full path; after that it is found by its name. The settings that
choose the CPU plugin are made here too, unless the user has made them; a process has one plugin.
"""

from __future__ import annotations

import ctypes
import functools
import os
import re
import sys
from pathlib import Path
from typing import Any

ID_BYTES = 4096
DTYPES = {
    "int8": 0, "uint8": 1, "int32": 2, "uint32": 3, "int64": 4, "uint64": 5, "float16": 6,
    "float32": 7, "float64": 8, "bfloat16": 9,
}  # fmt: skip
REDUCE_OPS = {"sum": 0, "prod": 1, "max": 2, "min": 3}
AVERAGE = 4
# The plugin's own way is a spinning worker thread beside each spinning caller: with more ranks than
# cores, 3 of them made 18 operations a second. Our calls have a thread of their own already, which
# does the work and yields while it waits: 370 a second.
_CPU_SETTINGS = {
    "CCL_PLUGIN": "ONECCL_LEGACY_CPU",
    "CCL_ATL_TRANSPORT": "ofi",
    "CCL_WORKER_OFFLOAD": "0",
    "CCL_YIELD": "sched_yield",
}
_NAME = "libccl.so.2"
_CPU_PLUGIN = "libccl_legacy_cpu.so"
_MISSING = re.compile(r"(\S+): cannot open shared object file")
_MAX_DEPENDENCIES = 64
_serves = ""  # the device for which this process has loaded it


class UniqueId(ctypes.Structure):
    """What rank 0 draws and all ranks join by."""

    _fields_ = (("data", ctypes.c_char * ID_BYTES),)


def folder() -> Path | None:
    """Return the folder of the environment that holds the library, None if none does."""
    for root in dict.fromkeys((sys.prefix, sys.exec_prefix, sys.base_prefix)):
        path = Path(root, "lib")
        if (path / _NAME).exists():
            return path
    return None


@functools.cache
def load(device: str = "cpu") -> Any:
    """Load the library for arrays on the host ("cpu") or on Intel GPUs ("xpu").

    Raises:
        OSError: it is not installed, or not completely; or it serves the other kind already.
    """
    global _serves
    path = folder()
    if path is None:
        raise OSError(f"{_NAME} is not in this environment")
    if _serves not in ("", device):
        raise OSError(f"oneCCL serves arrays on {_serves} in this process, and only those")
    _serves = device
    settings = {"CCL_LOG_LEVEL": "error", "FI_PROVIDER_PATH": str(path)}
    if device == "cpu":
        settings |= _CPU_SETTINGS
    for name, value in settings.items():
        os.environ.setdefault(name, value)
    library = _load(path / _NAME)
    if device == "cpu":
        _load(path / _CPU_PLUGIN)
    _declare(library)
    return library


def _load(path: Path) -> Any:
    for _ in range(_MAX_DEPENDENCIES):
        try:
            return ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL)
        except OSError as err:
            missing = _MISSING.match(str(err))
            needed = path.parent / missing[1] if missing else path
            if needed == path or not needed.exists():
                raise
            _load(needed)
    raise OSError(f"{path.name} needs more than {_MAX_DEPENDENCIES} libraries")


def _declare(library: Any) -> None:
    pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    for name, arguments in {
        "onecclGetUniqueId": (ctypes.POINTER(UniqueId),),
        "onecclCommInitRank": (ctypes.POINTER(pointer), number, UniqueId, number),
        "onecclCommDestroy": (pointer,),
        "onecclAllReduce": (pointer, pointer, size, number, number, pointer, pointer),
        "onecclReduceScatter": (pointer, pointer, size, number, number, pointer, pointer),
        "onecclAllGather": (pointer, pointer, size, number, pointer, pointer),
        "onecclBroadcast": (pointer, pointer, size, number, number, pointer, pointer),
        "onecclAllToAll": (pointer, pointer, size, number, pointer, pointer),
        "onecclReduce": (pointer, pointer, size, number, number, number, pointer, pointer),
        "onecclSend": (pointer, size, number, number, pointer, pointer),
        "onecclRecv": (pointer, size, number, number, pointer, pointer),
        "onecclGroupStart": (),
        "onecclGroupEnd": (),
        "onecclSetDevice": (number,),
    }.items():
        getattr(library, name).argtypes = arguments
        getattr(library, name).restype = number
    library.onecclGetErrorString.argtypes = (number,)
    library.onecclGetErrorString.restype = ctypes.c_char_p


class Communicator:
    """One oneCCL communicator.

    On host memory every call blocks, and cannot be aborted; on a device it is put on the stream.
    """

    def __init__(
        self, size: int, rank: int, unique_id: bytes, device: str = "cpu", index: int = 0
    ) -> None:
        self._library = load(device)
        self._handle = ctypes.c_void_p()
        if device != "cpu":
            self._check("SetDevice", self._library.onecclSetDevice(index))
        joined = UniqueId()
        ctypes.memmove(ctypes.byref(joined), unique_id, ID_BYTES)
        self._check(
            "CommInitRank",
            self._library.onecclCommInitRank(ctypes.byref(self._handle), size, joined, rank),
        )

    def call(self, name: str, *arguments: Any, stream: int | None = None) -> None:
        """Call `oneccl<name>(*arguments, communicator, stream)`; no stream on host memory.

        Raises:
            RuntimeError: the library says that it failed.
        """
        function = getattr(self._library, f"oneccl{name}")
        self._check(name, function(*arguments, self._handle, stream))

    def group(self, name: str) -> None:
        """Call `onecclGroupStart` or `onecclGroupEnd`."""
        self._check(name, getattr(self._library, f"oneccl{name}")())

    def close(self) -> None:
        """Destroy the communicator."""
        self._check("CommDestroy", self._library.onecclCommDestroy(self._handle))

    def _check(self, name: str, result: int) -> None:
        if result:
            text = self._library.onecclGetErrorString(result) or b""
            raise RuntimeError(f"oneccl{name}: {text.decode(errors='replace')} ({result})")


def unique_id(device: str = "cpu") -> bytes:
    """Draw the id by which the members of a new communicator find each other."""
    drawn = UniqueId()
    result = load(device).onecclGetUniqueId(ctypes.byref(drawn))
    if result:
        raise RuntimeError(f"onecclGetUniqueId failed ({result})")
    return bytes(drawn)
