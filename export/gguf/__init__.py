"""Write a checkpoint as a GGUF file, which is proven against the files of the checkpoint."""
