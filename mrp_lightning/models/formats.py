"""Checkpoint formats that other packages teach transformers."""

from importlib.metadata import entry_points
from typing import Any

GROUP = "mrp_lightning.checkpoint_formats"
"""Group of entry points that map a checkpoint's `quant_method` to the module that registers it."""


def register_format(config: Any) -> None:
    """Import the package that reads a quantized checkpoint, where one is installed for it.

    transformers finds no plug-ins by itself: `from_pretrained` says that a format is unknown if
    nobody has registered it.

    Args:
        config: Configuration of the checkpoint.
    """
    settings = getattr(config, "quantization_config", None)
    if not settings:
        return
    if not isinstance(settings, dict):
        settings = settings.to_dict()
    for plugin in entry_points(group=GROUP, name=str(settings.get("quant_method"))):
        plugin.load()
