"""Run probes: small checks, each in a separate process that must answer before a deadline."""
