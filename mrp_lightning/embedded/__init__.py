"""The small model that comes with the package, so that everything runs without a hub."""

from pathlib import Path

STDLIB_LLAMA = Path(__file__).parent / "stdlib-llama"
"""Directory of a small LLaMA of Python source. `make embedded-model` trains it anew."""
