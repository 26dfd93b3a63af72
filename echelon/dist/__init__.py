"""Provide collective operations; `init()` joins the world and returns its `ProcessGroup`."""

from echelon.dist.agreement.stop import request_stop, should_stop, stop_on_signals, stop_reason
from echelon.dist.group import ProcessGroup
from echelon.dist.operation.arrays import Array
from echelon.dist.options import Options
from echelon.dist.runtime import init, is_initialized, new_group, shutdown, world
from echelon.dist.work import Work

__all__ = [
    "init",
    "is_initialized",
    "world",
    "new_group",
    "shutdown",
    "should_stop",
    "stop_on_signals",
    "request_stop",
    "stop_reason",
    "ProcessGroup",
    "Work",
    "Array",
    "Options",
]
