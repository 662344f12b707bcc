"""A checkpoint is packed, and the packed one is checked to compute the same before it is kept."""
