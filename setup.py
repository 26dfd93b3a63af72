"""The one thing pyproject.toml cannot say yet: an extension that may fail to build.

Without a compiler the install succeeds all the same, and the pure-Python engine is used.
"""

from pathlib import Path

from setuptools import Extension, setup

NATIVE = Path("echelon/dist/backends/shm/native")

setup(
    ext_modules=[
        Extension(
            "echelon.dist.backends.shm._native",
            sources=sorted(str(path) for path in NATIVE.glob("*.c")),
            depends=sorted(str(path) for path in NATIVE.glob("*.h")),
            extra_compile_args=[
                "-std=c11", "-O3", "-ffp-contract=off", "-fvisibility=hidden", "-pthread",
            ],
            extra_link_args=["-pthread"],
            optional=True,
        )
    ]
)  # fmt: skip
