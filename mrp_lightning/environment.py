"""The environment of a command: hub, libraries, and their versions for reports; without torch."""

import json
import logging
import os
import platform
import re
import shlex
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from mrp_lightning.errors import DependencyError

__version__ = "0.1.0"

progress_log = logging.getLogger("lightning.pytorch.progress")
"""Logger of progress messages; a child of Lightning's logger, so that they reach the terminal."""


_HUB_SECONDS = 3
"""Seconds that the hub has to answer."""
_ANSWER_SECONDS = 60
"""The most seconds for which an answer of the hub, or its absence, is cached."""


def why_no_hub() -> str | None:
    """Return why the hub cannot be reached, `None` if it can be.

    Libraries that load from the hub retry each file for half a minute; here a single request
    decides, whose answer is cached for up to a minute.
    """
    import huggingface_hub

    if huggingface_hub.is_offline_mode():
        return "HF_HUB_OFFLINE is set"
    return _ask_hub(int(time.monotonic() / _ANSWER_SECONDS))


@lru_cache(maxsize=1)
def _ask_hub(period: int) -> str | None:  # noqa: ARG001  (an answer counts for a while)
    from huggingface_hub import constants, get_session

    try:
        get_session().head(constants.ENDPOINT, timeout=_HUB_SECONDS)
    except Exception as error:  # of many types: no name, no route, no certificate
        return f"{constants.ENDPOINT} cannot be reached: {error}"
    return None


_SPINS = "1000"
"""Turns of libgomp's waiting loop, some ten microseconds, before a thread sleeps."""


def wait_briefly() -> None:
    """Make torch's threads sleep soon where they wait for each other; call it before torch loads.

    In libgomp a thread that is finished waits in a loop of 300,000 turns, about ten milliseconds,
    for the others. If other work leaves too few cores, the loop occupies the core that a slower
    thread needs, at each of thousands of products. A user's own OMP_WAIT_POLICY or GOMP_SPINCOUNT
    stays.
    """
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
        os.environ["GOMP_SPINCOUNT"] = _SPINS


def silence_torchao() -> None:
    """Silence the messages that torchao logs while it is imported.

    transformers imports torchao if it is installed, even if it is not used. torchao then warns of
    each of its libraries that was built for another device, CUDA or Python, and of calls that torch
    deprecates. All other messages are shown.
    """
    logging.getLogger("torchao").addFilter(_is_no_loading_message)
    logging.getLogger("torch.utils._pytree").addFilter(_is_no_loading_message)


def _is_no_loading_message(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith(("Failed to load ", "%s is an Enum subclass "))


def silence_lightning() -> None:
    """Silence Lightning's messages about other packages and its own code.

    These are tips to install two packages of its makers, the note that TensorBoard is missing, and
    warnings of deprecated functions of torch that it calls. All other messages are shown.
    """
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(_is_no_tip)
    for message in (".*`tensorboardX` has been removed", ".*LeafSpec.* is deprecated"):
        warnings.filterwarnings("ignore", message=message)


def _is_no_tip(record: logging.LogRecord) -> bool:
    return "Tip: For seamless cloud" not in str(record.msg)


@contextmanager
def silent_start() -> Iterator[None]:
    """Silence Lightning's messages about absent devices and the seed.

    transformers' bars of loading and writing are silenced, too; those of downloads are shown.
    """
    names = ("lightning.pytorch.utilities.rank_zero", "lightning.fabric.utilities.seed")
    loggers = [logging.getLogger(name) for name in names]
    for logger in loggers:
        logger.addFilter(_names_something)
    try:
        with _no_loading_bars():
            yield
    finally:
        for logger in loggers:
            logger.removeFilter(_names_something)


def _names_something(record: logging.LogRecord) -> bool:
    return re.match(r"[GTH]PU available: False|Seed set to", record.getMessage()) is None


@contextmanager
def _no_loading_bars() -> Iterator[None]:
    """Disable transformers' bars, but not those of the hub's downloads, which it disables, too."""
    from huggingface_hub.utils import are_progress_bars_disabled, enable_progress_bars
    from transformers.utils import logging as transformers_logging

    had_bars, had_downloads = (
        transformers_logging.is_progress_bar_enabled(),
        not are_progress_bars_disabled(),
    )
    transformers_logging.disable_progress_bar()
    if had_downloads:
        enable_progress_bars()
    try:
        yield
    finally:
        if had_bars:
            transformers_logging.enable_progress_bar()


@contextmanager
def quiet_lightning() -> Iterator[None]:
    """Silence Lightning's messages and transformers' loading bars; progress is still reported.

    Until the context ends, `sys.argv` has no arguments and warnings are shown without their source.
    """
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric")]
    levels = [logger.level for logger in loggers]
    argv, formatwarning = sys.argv, warnings.formatwarning
    sys.argv = argv[:1]  # LightningCLI warns if there are arguments in `sys.argv`, too
    for logger in loggers:
        logger.setLevel(logging.WARNING)
    progress_log.setLevel(logging.INFO)
    try:
        with _no_loading_bars(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*does not have many workers.*")
            # The source line of a warning means nothing to the user of a command.
            warnings.formatwarning = lambda message, *_, **__: f"{message}\n"
            yield
    finally:
        warnings.formatwarning = formatwarning
        sys.argv = argv
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        progress_log.setLevel(logging.NOTSET)


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
