"""Shared by the tests of commands."""

# Lightning's log handler keeps the stream that it finds when it is first imported, as commands do
# when they are run. Within a test that is what the test captures, and it is closed after the test.
import lightning.pytorch  # noqa: F401
