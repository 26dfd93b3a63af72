"""What Linux knows about this host and its processes; every other room may ask here.

One answer each to "which process", "which host" and "how many cores". Nothing of echelon is
imported, so that every room can import this one. Each file names its source in the kernel, and
what a container may deny is reported as denied, never guessed.
"""
