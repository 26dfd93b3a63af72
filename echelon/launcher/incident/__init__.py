"""Handle an incident: collect it from the nodes, analyse it, show the root cause's output."""
