"""Find the other ranks of a group, and track their hosts, processes and clocks."""
