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
    for plugin in entry_points(group=GROUP, name=_method(_quantization(config))):
        plugin.load()


def why_not_readable(config: Any) -> str | None:
    """What keeps the weights of a checkpoint from being read as they were trained.

    Args:
        config: Configuration of the checkpoint.

    Returns:
        That it is quantized, with the next step; `None` if it is not, if a registered format reads
        it, or if its configuration asks transformers to dequantize it.
    """
    settings = _quantization(config)
    if not settings or settings.get("dequantize"):
        return None
    method = _method(settings)
    if entry_points(group=GROUP, name=method):
        return None
    return (
        f"quantized ({method}), and its weights cannot be read as matrices: load it in 16 bits. "
        "Name the checkpoint that it was quantized from, or dequantize this one with transformers "
        "and save it, or give the dequantized model itself."
    )


def _quantization(config: Any) -> dict[str, Any]:
    settings = getattr(config, "quantization_config", None) or {}
    return settings if isinstance(settings, dict) else settings.to_dict()


def _method(settings: dict[str, Any]) -> str:
    return str(settings.get("quant_method", "by an unknown method"))
