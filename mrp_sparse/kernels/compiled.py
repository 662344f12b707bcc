"""The compiled kernels for CPUs, built on first use if there is a compiler."""

import functools
import logging
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from mrp_ground.environment import locked

log = logging.getLogger(__name__)

SOURCES = Path(__file__).with_name("cpu")
NAME = "mrp_lightning_cpu"
_NEXT_STEP = "Install ninja (pip install ninja) and a C++ compiler such as g++."
_lock = threading.Lock()


def load() -> bool:
    """Load the compiled kernels, which then run the operators on the CPU; return whether they do.

    The first call on a machine compiles them into torch's cache of extensions. If that fails, a
    warning gives the reason, once.
    """
    with _lock:
        return _load()


@functools.cache
def _load() -> bool:
    with _scripts_on_path():
        reason = _missing_tool() or _build()
    if reason is not None:
        log.warning(
            "Packed weights are unpacked for every product on this CPU, which is slow: the kernels "
            "for them cannot be built (%s). %s",
            reason,
            _NEXT_STEP,
        )
    return reason is None


def _missing_tool() -> str | None:
    from torch.utils import cpp_extension

    if not cpp_extension.is_ninja_available():
        return "ninja is not installed"
    compiler, *_ = shlex.split(cpp_extension.get_cxx_compiler())
    return None if shutil.which(compiler) else f"there is no compiler {compiler!r}"


def _build() -> str | None:
    """Compile and load the kernels if they changed; return the reason if that fails."""
    from torch.utils import cpp_extension

    # The binary depends on torch's version, which torch's own name for the directory leaves out.
    root = os.environ.get("TORCH_EXTENSIONS_DIR") or cpp_extension.get_default_build_root()
    directory = Path(root) / f"{NAME}-{torch.__version__}"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with locked(directory / "processes.lock"):
            (directory / "lock").unlink(missing_ok=True)  # of a killed process
            if not any(directory.glob(f"{NAME}.*")):
                log.warning("Compiling the kernels for packed weights, once: about a minute.")
            cpp_extension.load(
                NAME,
                [str(SOURCES / "operators.cpp")],
                extra_cflags=["-O3", *_OPENMP],
                extra_ldflags=[*_OPENMP],
                build_directory=str(directory),
                is_python_module=False,
            )
    except (RuntimeError, OSError, subprocess.SubprocessError) as error:
        log.debug("The build failed.", exc_info=True)
        lines = [line for line in str(error).splitlines() if line] or [repr(error)]
        return next((line for line in lines if "error: " in line), lines[0])
    return None


_OPENMP = ("-fopenmp",) if sys.platform == "linux" else ()
"""The flags for torch's threads on Linux; other systems have other flags, or none."""


@contextmanager
def _scripts_on_path() -> Iterator[None]:
    """Add the scripts of this environment, such as ninja, to PATH, in case it is not active."""
    path = os.environ.get("PATH", "")
    os.environ["PATH"] = os.pathsep.join((sysconfig.get_path("scripts"), path))
    try:
        yield
    finally:
        os.environ["PATH"] = path
