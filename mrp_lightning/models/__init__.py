"""Models and tokenizers are loaded from a name or a directory, and saved."""
