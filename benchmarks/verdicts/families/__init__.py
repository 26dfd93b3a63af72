"""Families of cases, by type of fault."""
