"""Run stages of torch modules, with messages between stages, ties and replicas."""
