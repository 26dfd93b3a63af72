"""The server: its loop, its peers, and what each command does."""
