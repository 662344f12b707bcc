"""Texts → the batches that a trainer reads."""
