"""Determine what a thread is doing from its stack, with pure functions over tables of frames."""

from echelon.analysis.activity.c_stack import num_inside
from echelon.analysis.activity.doing import Activity, Doing
from echelon.analysis.activity.reader import read_activity
from echelon.analysis.activity.worker import WorkerState, read_worker

__all__ = ["Activity", "Doing", "WorkerState", "num_inside", "read_activity", "read_worker"]
