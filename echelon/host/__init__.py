"""Read what Linux reports about this host and its processes.

This package is the only place that answers the questions "which process", "which host" and "how
many cores". It imports nothing from the rest of echelon, so every other package can import it. Each
module names its source in the kernel. Values that a container denies are reported as denied, never
guessed.
"""
