"""The state of a store: keys, queues, rounds, leases and their waiters. No I/O, no clock."""
