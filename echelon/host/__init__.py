"""Read what Linux reports about this host and its processes.

All code that identifies processes and hosts, or counts usable cores, belongs to this package. The
package imports nothing from the rest of echelon, so every other package can import it. If a
container makes a value unreadable, the value is reported as denied and never guessed.
"""
