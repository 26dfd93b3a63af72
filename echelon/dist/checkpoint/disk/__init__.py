"""A checkpoint's folder, its files, and the bytes in them."""
