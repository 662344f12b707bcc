"""A model → perplexity and zero-shot accuracy, and the file that records them."""
