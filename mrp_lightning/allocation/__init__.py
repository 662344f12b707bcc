"""Each block of a model gets a sparsity of its own, and the whole model the requested one."""
