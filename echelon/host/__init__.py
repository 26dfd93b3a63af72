"""What Linux reports about this host and its processes; every other room may use this one.

It gives one answer each to "which process", "which host" and "how many cores". It imports nothing
of echelon, so every room can import it. Each file names its source in the kernel. What a container
denies is reported as denied, never guessed.
"""
