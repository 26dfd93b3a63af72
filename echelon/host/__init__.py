"""Read what Linux reports about this host and its processes.

Only this package determines which process this is, which host it is on, and how many cores it may
use. It imports nothing from the rest of echelon, so every other package can import it. Each module
names its source in the kernel. A value that a container denies is reported as denied, never
guessed.
"""
