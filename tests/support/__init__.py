"""Helpers for the tests of several packages: ranks, hosts, machines, clocks, ports and links."""
