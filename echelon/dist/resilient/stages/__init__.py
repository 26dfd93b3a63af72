"""Store the state of a pipeline's stages, and restore it in rebuilt stages."""
