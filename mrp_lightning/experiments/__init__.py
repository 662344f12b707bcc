"""Sweeps of many runs, and tables, pictures and a page of their results."""
