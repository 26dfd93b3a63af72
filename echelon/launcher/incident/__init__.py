"""An incident: its collection from the nodes, its analysis, and the root cause's last output."""
