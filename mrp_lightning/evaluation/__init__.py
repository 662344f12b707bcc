"""Measure the perplexity and the zero-shot accuracy of a model."""
