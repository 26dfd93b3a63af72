"""The executor: stages of torch modules, the messages between them, ties and replicas."""
