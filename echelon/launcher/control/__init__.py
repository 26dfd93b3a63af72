"""How the agents of a job's nodes talk: messages, and the links that carry them."""
