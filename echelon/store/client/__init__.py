"""Provide the client: its calls, the connections that carry them, and servers it hosts."""
