"""The environment of a command: device, hub, libraries; and the part of it that a report names."""

import json
import logging
import os
import platform
import shlex
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, lru_cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

import torch

from mrp_lightning.errors import DependencyError, OptionError, OutOfMemoryError, first_line

__version__ = "0.1.0"

progress_log = logging.getLogger("lightning.pytorch.progress")
"""Logger of progress messages; a child of Lightning's logger, so that they reach the terminal."""


def device_named(name: str | None) -> torch.device:
    """Return the device of `--device`: cpu, cuda or cuda:N; `None` is CUDA where there is one.

    Raises:
        OptionError: It is none of these, or is not there.
    """
    if name is None:
        warn_of_unused_gpu()
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise OptionError(f"`--device`: {str(error).splitlines()[0]}") from error
    if device.type not in ("cpu", "cuda"):
        raise OptionError(f"`--device {name}`: expected cpu, cuda or cuda:N.")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise OptionError(
            f"`--device {name}`: this machine has {torch.cuda.device_count() or 'no'} CUDA "
            "device; try `cpu`."
        )
    return device


@cache
def warn_of_unused_gpu() -> None:
    """Warn once if torch is a CUDA build and can use no GPU, so that the CPU does all the work.

    torch falls back without an error if the driver is older than its CUDA, or if a container was
    started without its GPUs. A GPU that `CUDA_VISIBLE_DEVICES` hides is left out on purpose.
    """
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    if torch.version.cuda is None or hidden or torch.cuda.is_available():
        return
    try:
        torch.cuda.init()
        reason = "it sees no device"
    except (AssertionError, RuntimeError) as error:
        reason = first_line(error)
    progress_log.warning(
        "THE CPU DOES ALL THE WORK: torch %s is a build for CUDA %s and can use no GPU (%s). If "
        "this machine has one, check `nvidia-smi`: CUDA 13 needs a driver 580 or newer, a "
        "container its `--gpus all`, and torch for an older driver comes from "
        "https://download.pytorch.org/whl/cu126. If it has none, set CUDA_VISIBLE_DEVICES=-1.",
        torch.__version__,
        torch.version.cuda,
        reason,
    )


_HUB_SECONDS = 3
"""How long the hub has to answer."""
_ANSWER_SECONDS = 60
"""How long its answer, or its silence, counts."""


def why_no_hub() -> str | None:
    """Return why the hub cannot be reached, `None` if it can be.

    Libraries that load from it try each file for half a minute; here one request decides.
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
    except Exception as error:  # of whichever library asks: no name, no route, no certificate
        return f"{constants.ENDPOINT} cannot be reached: {error}"
    return None


_NO_MEMORY = ("DefaultCPUAllocator", "out of memory", "ALLOC_FAILED")


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error reports that a CPU or an accelerator is out of memory."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError | OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error) for word in _NO_MEMORY)


def silence_torchao() -> None:
    """Silence the messages of torchao while it is loaded.

    transformers loads it wherever it is installed, whether it is used or not, and torchao then
    warns of each of its libraries that was built for another device, CUDA or Python, and of calls
    that torch deprecates. All other messages are shown.
    """
    logging.getLogger("torchao").addFilter(_is_no_loading_message)
    logging.getLogger("torch.utils._pytree").addFilter(_is_no_loading_message)


def _is_no_loading_message(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith(("Failed to load ", "%s is an Enum subclass "))


def silence_lightning() -> None:
    """Silence what Lightning logs about other packages and its own code.

    These are tips to install two packages of its makers, that TensorBoard is missing where logs are
    asked for, and that it calls deprecated functions of torch. All other messages are shown.
    """
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(_is_no_tip)
    for message in (".*`tensorboardX` has been removed", ".*LeafSpec.* is deprecated"):
        warnings.filterwarnings("ignore", message=message)


def _is_no_tip(record: logging.LogRecord) -> bool:
    return "Tip: For seamless cloud" not in str(record.msg)


@contextmanager
def quiet_lightning() -> Iterator[None]:
    """Silence Lightning's messages and transformers' loading bars; progress is still reported."""
    from transformers.utils import logging as transformers_logging

    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric")]
    levels = [logger.level for logger in loggers]
    argv, bars = sys.argv, transformers_logging.is_progress_bar_enabled()
    formatwarning = warnings.formatwarning
    sys.argv = argv[:1]  # LightningCLI warns if there are arguments in `sys.argv`, too
    transformers_logging.disable_progress_bar()
    for logger in loggers:
        logger.setLevel(logging.WARNING)
    progress_log.setLevel(logging.INFO)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*does not have many workers.*")
            # The line of ours that warns tells a user of a command nothing.
            warnings.formatwarning = lambda message, *_, **__: f"{message}\n"
            yield
    finally:
        warnings.formatwarning = formatwarning
        sys.argv = argv
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        progress_log.setLevel(logging.NOTSET)
        if bars:
            transformers_logging.enable_progress_bar()


@contextmanager
def extra(name: str, purpose: str) -> Iterator[None]:
    """Explain an import that fails in this context by the extra of `pyproject.toml` that it needs.

    Raises:
        DependencyError: An import inside failed, which `what` needs.
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

    The name alone would be looked up in an index, which may not have what was installed from a
    directory. PEP 610 records that directory; a checkout that is imported as it is has none.
    """
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
    """Return the command line that started this process, `None` at a prompt and in a notebook.

    The interpreter and what is installed beside it are called by their names alone.
    """
    first, *rest = sys.orig_argv[1:] or [""]
    if first in ("", "-c", "-i") or "ipykernel_launcher" in rest:
        return None
    if Path(first).parent == Path(sys.executable).parent:
        return shlex.join([Path(first).name, *rest])
    return shlex.join(["python", first, *rest])


def versions() -> dict[str, str]:
    """Return the versions of the loaded libraries; others had no part in a result."""
    loaded = {"mrp_lightning": __version__, "python": platform.python_version()}
    for name in ("torch", "lightning", "transformers", "lm_eval"):
        if name in sys.modules:
            loaded[name] = str(sys.modules[name].__version__)
    if torch.version.cuda:
        loaded["cuda"] = torch.version.cuda
    return loaded
