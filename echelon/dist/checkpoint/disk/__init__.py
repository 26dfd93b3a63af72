"""A checkpoint's folder, its files and their bytes."""
