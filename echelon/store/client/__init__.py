"""The store's client: its calls, its connections, and the servers that its process hosts."""
