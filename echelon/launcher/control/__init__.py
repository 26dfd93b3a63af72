"""Connect the agents of a job's nodes: the endpoint, the messages, and the links."""
