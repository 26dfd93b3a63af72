"""What tests of several rooms share: ranks, hosts, machines, clocks, ports and links."""
