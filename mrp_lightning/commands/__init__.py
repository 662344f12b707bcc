"""The command line."""

# Before anything else: `typing` keeps one of `int | float` and `float | int` for both, whichever
# came first in the process. If rich's came before Lightning's, `limit_test_batches: 1` would be
# read as 1.0, which is all batches. Lightning's log handler also keeps the stream it finds here.
import lightning.pytorch  # noqa: F401
