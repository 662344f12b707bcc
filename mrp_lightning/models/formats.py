"""Checkpoint formats that other packages teach transformers."""

from importlib.metadata import entry_points
from typing import Any

GROUP = "mrp_lightning.checkpoint_formats"
"""Entry points: `quant_method` of a checkpoint → the module whose import registers its format."""


def register_format(config: Any) -> None:
    """Import the package that reads a quantized checkpoint, where one is installed for it.

    transformers finds no plug-ins by itself: a format that nobody has registered is unknown to
    `from_pretrained`, which then says so.

    Args:
        config: The checkpoint's transformers configuration.
    """
    settings = getattr(config, "quantization_config", None)
    if not settings:
        return
    if not isinstance(settings, dict):
        settings = settings.to_dict()
    for plugin in entry_points(group=GROUP, name=str(settings.get("quant_method"))):
        plugin.load()
