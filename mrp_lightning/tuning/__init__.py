"""A pruned block → the same block, its kept weights tuned towards the dense model's outputs."""
