"""The client: its calls, the connections that carry them, and servers hosted in this process."""
