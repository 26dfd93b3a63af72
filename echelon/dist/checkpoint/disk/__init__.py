"""The folder of a checkpoint, its files and their bytes."""
