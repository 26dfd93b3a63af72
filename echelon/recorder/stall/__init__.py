"""Detect stalls: the stall rule, and a watch inside processes that have no agent."""
