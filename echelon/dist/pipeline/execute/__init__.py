"""The executor: stages of torch modules, what passes between them, ties and replicas."""
