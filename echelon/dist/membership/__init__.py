"""Membership: meeting the other ranks, and their hosts, processes and clocks."""
