"""A checkpoint → a packed one, all or nothing, and the proof that it computes the same."""
