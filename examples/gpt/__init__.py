"""The parts of the training example, one noun per file; `train_gpt.py` combines them."""
