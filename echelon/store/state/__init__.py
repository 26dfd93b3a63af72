"""Keep the state of a store: keys, queues, rounds, leases and waiters, without I/O or a clock."""
