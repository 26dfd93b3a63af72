"""The one thing pyproject.toml cannot say yet: an extension that may fail to build.

Without a compiler the install succeeds all the same, and the pure-Python engine is used.
"""

from pathlib import Path

from setuptools import Extension, setup

NATIVE = Path("echelon/dist/backends/shm/native")
SOURCES = ("module", "engine", "collectives", "messages", "waiting", "reduce")

setup(
    ext_modules=[
        Extension(
            "echelon.dist.backends.shm._native",
            sources=[str(NATIVE / f"{name}.c") for name in SOURCES],
            depends=[str(NATIVE / "engine.h"), str(NATIVE / "kernels.h")],
            extra_compile_args=[
                "-std=c11", "-O3", "-ffp-contract=off", "-fvisibility=hidden", "-pthread",
            ],
            extra_link_args=["-pthread"],
            optional=True,
        )
    ]
)  # fmt: skip
