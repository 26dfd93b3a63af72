"""How the agents of a job's nodes reach each other: the endpoint, messages, and their links."""
