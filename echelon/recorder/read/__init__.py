"""Read black boxes: live rings, rings of dead processes, and dump files."""

from echelon.recorder.read.reader import LiveRing as LiveRing
from echelon.recorder.read.reader import read as read
from echelon.recorder.read.reader import read_dump as read_dump
from echelon.recorder.read.reader import read_ring as read_ring
