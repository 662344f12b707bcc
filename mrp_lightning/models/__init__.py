"""A name or a directory → a model and its tokenizer, and back to disk."""
