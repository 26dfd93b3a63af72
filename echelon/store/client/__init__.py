"""Provide the client: its calls, the connections that carry them, and the servers it hosts."""
