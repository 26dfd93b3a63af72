"""Manage the state of a store (keys, queues, barriers, gathers, leases and waiters) without I/O."""
