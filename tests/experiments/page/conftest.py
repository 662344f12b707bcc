"""Runs on disk; html_page.py can be imported."""

import sys
from pathlib import Path

from saved_runs import layer_fixture, save_perplexity, save_run, save_sweep, sweep, tmp_path  # noqa: F401

sys.path.insert(0, str(Path(__file__).parent))
