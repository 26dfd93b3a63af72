"""Families of cases, by what goes wrong in a job."""
