"""An incident: what the nodes collect of it, its analysis, and its story."""
