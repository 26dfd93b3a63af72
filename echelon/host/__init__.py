"""Read what Linux reports about this host and its processes.

This package alone identifies the process and its host, and counts the usable cores. It imports
nothing from the rest of echelon, so every other package can import it. A value that a container
denies is reported as denied, never guessed.
"""
