"""The state of a store: keys, queues, rounds, leases and their waiters, without I/O or a clock."""
