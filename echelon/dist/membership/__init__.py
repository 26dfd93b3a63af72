"""Membership: meets the other ranks, and tracks their hosts, processes and clocks."""
