"""Meet the other ranks, and track their hosts, processes and clocks."""
