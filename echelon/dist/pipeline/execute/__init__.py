"""Run pipeline stages that are made of torch modules."""
