"""Determine from a thread's stack what the thread is doing."""

from echelon.analysis.activity.c_stack import num_inside
from echelon.analysis.activity.doing import Activity, Doing
from echelon.analysis.activity.reader import read_activity
from echelon.analysis.activity.worker import WorkerState, read_worker

__all__ = ["Activity", "Doing", "WorkerState", "num_inside", "read_activity", "read_worker"]
