"""Zeros → a packed form: the tensors in a file, and back."""
