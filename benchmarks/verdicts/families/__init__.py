"""The families of cases, grouped by type of fault."""
