"""Sweeps make many runs, and tables, pictures and pages of their results."""
