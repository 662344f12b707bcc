"""A model → a sparsity for each of its blocks, the mean of which is the one asked for."""
