"""Read and write checkpoint folders and the files in them."""
