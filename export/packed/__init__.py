"""Zeros → a packed format, on disk and in a module."""
