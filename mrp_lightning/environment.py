"""The environment of a command: messages, hub, libraries and their versions; without torch."""

import json
import logging
import platform
import shlex
import sys
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path

from mrp_lightning.errors import DependencyError

__version__ = "0.1.0"

progress_log = logging.getLogger("lightning.pytorch.progress")
"""Logger of progress messages; a child of Lightning's logger, so that they reach the terminal."""


@contextmanager
def silenced(logger: str, parts: Sequence[str]) -> Iterator[None]:
    """Drop the messages of a logger that hold one of several parts, in this context."""

    def is_shown(record: logging.LogRecord) -> bool:
        return not any(part in record.getMessage() for part in parts)

    logging.getLogger(logger).addFilter(is_shown)
    try:
        yield
    finally:
        logging.getLogger(logger).removeFilter(is_shown)


@contextmanager
def at_level(level: int, loggers: Sequence[logging.Logger]) -> Iterator[None]:
    """Set the level of several loggers in this context."""
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(level)
        yield
    finally:
        for logger, before in zip(loggers, levels, strict=True):
            logger.setLevel(before)


@contextmanager
def without_bars() -> Iterator[None]:
    """Hide transformers' bars in this context, but not those of the hub's downloads."""
    from transformers.utils import logging as transformers_logging  # loads torch

    hook = transformers_logging.set_tqdm_hook(
        lambda _, args, __: transformers_logging.EmptyTqdm(*args)
    )
    try:
        yield
    finally:
        transformers_logging.set_tqdm_hook(hook)


ABSENT_DEVICES = ("GPU available: False", "TPU available: False", "HPU available: False")
"""Parts of Lightning's messages on accelerators that this machine lacks."""

_NOISE: Mapping[str, tuple[str, ...]] = {
    # torchao, which transformers imports where it is installed: libraries for other devices, and
    # calls that torch deprecates.
    "torchao": ("Failed to load ",),
    "torch.utils._pytree": ("is an Enum subclass ",),
    # Lightning: absent devices, the seed, and tips to install packages of its makers.
    "lightning.pytorch.utilities.rank_zero": (
        *ABSENT_DEVICES,
        "Tip: For seamless cloud",
        "Loading `train_dataloader` to estimate",
    ),
    "lightning.fabric.utilities.seed": ("Seed set to",),
}
"""Parts of the messages that are silenced, by logger."""

_WARNINGS = (
    ".*`tensorboardX` has been removed",
    ".*LeafSpec.* is deprecated",
    ".*does not have many workers.*",
    "OptimState8bit does not implement _stable_hash",
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
    lightning = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric")]
    formatwarning = warnings.formatwarning
    warnings.formatwarning = lambda message, *_, **__: f"{message}\n"
    try:
        with (
            at_level(logging.WARNING, lightning),
            at_level(logging.INFO, [progress_log]),
            without_noise(),
            without_bars(),
        ):
            yield
    finally:
        warnings.formatwarning = formatwarning


def why_no_hub() -> str | None:
    """Return why the hub cannot be reached, `None` if it can be.

    Libraries that load from the hub retry each file for half a minute; here a single request
    decides, of at most three seconds, whose answer is cached for up to a minute.
    """
    import huggingface_hub

    if huggingface_hub.is_offline_mode():
        return "HF_HUB_OFFLINE is set"
    return _ask_hub(int(time.monotonic() / 60))


@lru_cache(maxsize=1)
def _ask_hub(period: int) -> str | None:  # noqa: ARG001  (an answer counts for a while)
    from huggingface_hub import constants, get_session

    try:
        get_session().head(constants.ENDPOINT, timeout=3)
    except Exception as error:  # of many types: no name, no route, no certificate
        return f"{constants.ENDPOINT} cannot be reached: {error}"
    return None


@contextmanager
def extra(name: str, purpose: str) -> Iterator[None]:
    """Explain an import error in this context by the extra of `pyproject.toml` that is missing.

    `purpose` is the subject of the message, such as "The command line".

    Raises:
        DependencyError: An import in the context failed.
    """
    try:
        yield
    except ImportError as error:
        raise DependencyError(
            f"{purpose} needs a package that is not installed ({error}): "
            f"pip install {_requirement(name)}"
        ) from error


_PACKAGES = {
    "data": ("datasets",),
    "zeroshot": ("lm_eval", "accelerate"),
    "report": ("jinja2", "matplotlib", "pandas"),
    "gguf": ("gguf", "accelerate"),
    "torchao": ("torchao",),
}
"""The modules of the extras that a command needs for some of its options."""


def require_extra(name: str, purpose: str) -> None:
    """Raise, without importing any, if a package of an extra of `pyproject.toml` is missing.

    Raises:
        DependencyError: Packages are missing; the message lists all, with the command.
    """
    missing = [module for module in _PACKAGES[name] if find_spec(module) is None]
    if missing:
        raise DependencyError(
            f"{purpose} needs packages that are not installed ({', '.join(missing)}): "
            f"pip install {_requirement(name)}"
        )


def _requirement(extra_name: str) -> str:
    """Return the argument of `pip install` that adds an extra to this installation.

    An installation from a directory needs that directory, recorded as of PEP 610, since an index
    may lack the package. A checkout on `sys.path` has no record.
    """
    from urllib.parse import urlsplit
    from urllib.request import url2pathname  # slow to import, and only needed here

    checkout = Path(__file__).parents[1]
    if (checkout / "pyproject.toml").is_file():
        return f"-e '{checkout}[{extra_name}]'"
    try:
        record = distribution("mrp-lightning").read_text("direct_url.json")
    except PackageNotFoundError:
        record = None
    url = json.loads(record or "{}").get("url", "")
    source = url2pathname(urlsplit(url).path) if url.startswith("file:") else "mrp-lightning"
    return f"'{source}[{extra_name}]'"


def command() -> str | None:
    """Return the command line that started this process.

    It is `None` at a prompt, in a notebook and with `python -c`. The interpreter and installed
    scripts appear by their names, without directories.
    """
    first, *arguments = sys.orig_argv[1:] or [""]
    if first in ("", "-c", "-i") or "ipykernel_launcher" in arguments:
        return None
    if Path(first).parent == Path(sys.executable).parent:
        return shlex.join([Path(first).name, *arguments])
    return shlex.join(["python", first, *arguments])


def versions() -> dict[str, str]:
    """Return the versions of the imported libraries; others cannot have affected a result."""
    loaded = {"mrp_lightning": __version__, "python": platform.python_version()}
    for name in ("torch", "lightning", "transformers", "lm_eval"):
        if name in sys.modules:
            loaded[name] = str(sys.modules[name].__version__)
    if "torch" in sys.modules and (cuda := sys.modules["torch"].version.cuda):
        loaded["cuda"] = cuda
    return loaded
