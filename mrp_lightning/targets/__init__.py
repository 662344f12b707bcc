"""Find and plan the blocks and layers of a model to prune. It needs only torch."""
