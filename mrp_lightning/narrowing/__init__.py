"""A model → what can be cut out of it whole, and the narrower model."""
