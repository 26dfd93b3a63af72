"""What pyproject.toml cannot express: extensions that may fail to build.

Without a compiler the installation succeeds, and the Python implementations are used. With
ECHELON_PURE=1 no extension is built, and the wheel installs on every Python and machine.
"""

import os
from pathlib import Path

from setuptools import Extension, setup


def core(name: str, folder: str) -> Extension:
    """Describe an extension of the sources and headers in one folder."""
    return Extension(
        name,
        sources=sorted(str(path) for path in Path(folder).glob("*.c")),
        depends=sorted(str(path) for path in Path(folder).glob("*.h")),
        extra_compile_args=[
            "-std=c11", "-O3", "-ffp-contract=off", "-fvisibility=hidden", "-pthread",
        ],
        extra_link_args=["-pthread"],
        optional=True,
    )  # fmt: skip


CORES = [
    core("echelon.dist.backends.shm._native", "echelon/dist/backends/shm/native"),
    core("echelon.dist.resilient.copies._native", "echelon/dist/resilient/copies/native"),
    core("echelon.recorder._native", "echelon/recorder/native"),
    core("echelon.store.server._native", "echelon/store/server/native"),
]

setup(ext_modules=[] if os.environ.get("ECHELON_PURE") == "1" else CORES)
