"""Find whole neurons, heads or experts in a model, and cut them out of it."""
