"""Shared by the tests of commands."""

from pathlib import Path

# Lightning's log handler keeps the stream that it finds when it is first imported, as commands do
# when they are run. Within a test that is what the test captures, and it is closed after the test.
import lightning.pytorch  # noqa: F401
import pytest

LINES = "\n".join(f"value_{i} = compute({i}) + {i * 7}" for i in range(400))


@pytest.fixture
def text(tmp_path, monkeypatch) -> Path:
    """A file of text, in the working directory of the test."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "text.txt"
    path.write_text(LINES)
    return path
