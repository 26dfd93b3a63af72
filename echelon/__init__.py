"""A distributed training runtime that explains itself.

Import the room you need: `echelon.dist`, `echelon.store`, `echelon.recorder`. This module holds the
version and nothing else, so that importing it costs nothing.
"""

__version__ = "0.1.0"
