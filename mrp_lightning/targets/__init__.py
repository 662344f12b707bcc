"""Finds the blocks and layers of a model that can be pruned, and plans. It needs only torch."""
