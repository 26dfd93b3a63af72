"""Detect stalls, both in an agent and inside a process without an agent."""
