"""Who takes part: meeting the other ranks, their hosts, processes and clocks."""
