"""The kept weights of a pruned block are tuned towards its outputs in the dense model."""
