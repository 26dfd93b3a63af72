"""A distributed training runtime that explains why a job stalled or failed.

Import the packages you need, such as `echelon.dist`, `echelon.store` or `echelon.recorder`. After a
plain `import echelon`, packages are loaded on first use, so the import itself is cheap.
"""

TYPE_CHECKING = False  # what type checkers take as True; importing typing takes milliseconds

if TYPE_CHECKING:
    from types import ModuleType

    from echelon import analysis, dist, launcher, planner, recorder, store, tokens, train

__all__ = ["analysis", "dist", "launcher", "planner", "recorder", "store", "tokens", "train"]
__version__ = "0.1.0"


def __getattr__(name: str) -> "ModuleType":
    """Import a package on first use, and return it."""
    if name in __all__:
        from importlib import import_module

        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *__all__]
