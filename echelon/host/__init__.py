"""Read what Linux reports about this host and its processes.

Only this package identifies the process and its host and counts the usable cores. It imports
nothing from the rest of echelon, so every other package can import it. A value that a container
makes unreadable is reported as denied and never guessed.
"""
