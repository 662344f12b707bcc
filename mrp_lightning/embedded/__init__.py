"""The small model and the text that come with the package: everything runs without a hub."""

from pathlib import Path

STDLIB_LLAMA = Path(__file__).parent / "stdlib-llama"
"""Directory of a small LLaMA of Python source. `make embedded-model` trains it anew."""

DECLARATION = Path(__file__).parent / "declaration.json"
"""Article 1 of the Universal Declaration of Human Rights, by language."""
