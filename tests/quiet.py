"""Arguments of a trainer that runs on the CPU, prints nothing and writes nothing."""

from typing import Any

QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "enable_checkpointing": False,
}
