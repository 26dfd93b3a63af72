"""A representation of the recorded facts that is common to all sources."""
