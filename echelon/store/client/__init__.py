"""The client: calls, the connections that carry them, and hosting a server in the process."""
