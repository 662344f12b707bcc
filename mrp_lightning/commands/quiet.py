"""Contexts in which a command silences messages that mean nothing to its user."""

import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager

from mrp_lightning.environment import ABSENT_DEVICES, progress_log, silenced, without_bars

_NOISE: Mapping[str, tuple[str, ...]] = {
    # torchao, which transformers imports where it is installed: libraries for other devices, and
    # calls that torch deprecates.
    "torchao": ("Failed to load ",),
    "torch.utils._pytree": ("is an Enum subclass ",),
    # Lightning: absent devices, the seed, and tips to install packages of its makers.
    "lightning.pytorch.utilities.rank_zero": (
        *ABSENT_DEVICES,
        "Tip: For seamless cloud",
    ),
    "lightning.fabric.utilities.seed": ("Seed set to",),
}
"""Parts of the messages that are silenced, by logger."""

_WARNINGS = (
    ".*`tensorboardX` has been removed",
    ".*LeafSpec.* is deprecated",
    ".*does not have many workers.*",
    ".*LightningCLI's args parameter is intended to run from within Python",
)
"""The beginnings of the warnings that are silenced, as regular expressions."""


@contextmanager
def without_noise() -> Iterator[None]:
    """Silence the messages of `_NOISE` and the warnings of `_WARNINGS`."""
    with ExitStack() as stack:
        for name, parts in _NOISE.items():
            stack.enter_context(silenced(name, parts))
        stack.enter_context(warnings.catch_warnings())
        for message in _WARNINGS:
            warnings.filterwarnings("ignore", message=message)
        yield


@contextmanager
def quiet_lightning() -> Iterator[None]:
    """Silence noise, bars and Lightning's messages below warnings; progress is still reported.

    Warnings are shown without their source, which means nothing to the user of a command.
    """
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric")]
    levels = [logger.level for logger in loggers]
    formatwarning = warnings.formatwarning
    for logger in loggers:
        logger.setLevel(logging.WARNING)
    progress_log.setLevel(logging.INFO)
    warnings.formatwarning = lambda message, *_, **__: f"{message}\n"
    try:
        with without_noise(), without_bars():
            yield
    finally:
        warnings.formatwarning = formatwarning
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        progress_log.setLevel(logging.NOTSET)
