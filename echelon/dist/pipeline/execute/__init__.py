"""Run pipeline stages made of torch modules, with messages between stages, ties and replicas."""
