"""Handle an incident: collect it from the nodes, analyse it, and show the root cause's output."""
