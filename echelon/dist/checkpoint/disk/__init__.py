"""Read and write the folder of a checkpoint and the files in it."""
