"""What lets everything run without a hub: a text, and a small model that was trained on it."""

from pathlib import Path

STDLIB_LLAMA = Path(__file__).parent / "stdlib-llama"
"""Directory of a small LLaMA of Python source. `make embedded-model` trains it anew."""
