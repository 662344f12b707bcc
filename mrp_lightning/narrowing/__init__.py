"""Whole neurons, heads or experts are found in a model and cut out, which makes it narrower."""
