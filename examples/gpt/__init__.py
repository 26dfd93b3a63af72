"""The parts of the training example, one noun a file; `train_gpt.py` puts them together."""
