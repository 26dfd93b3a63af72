"""Readers of the dumps of torch's flight recorder, formats 2.5 to 2.13."""
