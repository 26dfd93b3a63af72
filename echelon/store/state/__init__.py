"""What a store holds: keys, queues, rounds, leases and their waiters. No I/O, no clock."""
