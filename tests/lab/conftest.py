"""Runs on disk."""

from saved_runs import save_perplexity, save_run, tmp_path  # noqa: F401
