"""Convert a pruned checkpoint, and verify that the result computes the same."""
