"""The compiled kernels for CPUs: loaded at the first product, if there are any."""

import functools
import logging
import threading

import torch

from mrp_sparse.kernels import library

log = logging.getLogger(__name__)

_lock = threading.Lock()


def load() -> bool:
    """Load the compiled kernels, which then run the operators on the CPU; return whether they do.

    A wheel has them. In a checkout they are built when it is installed, or by the first call after
    a source has changed. If there are none, a warning gives the reason, and a next step if there is
    one, once.
    """
    # The cache alone lets two threads run `_load` at the same time, and both would build.
    with _lock:
        return _load()


@functools.cache
def _load() -> bool:
    reason = _why_not()
    if reason is not None:
        log.warning(
            "Packed weights are unpacked for every product on this CPU, which is slow: there are "
            "no compiled kernels. %s",
            reason,
        )
    return reason is None


def _why_not() -> str | None:
    """Load the library, and build it before if it is missing; return the reason if that fails."""
    try:
        file = library.path()
        if not file.exists():
            log.warning("Compiling the kernels for packed weights, once: some seconds.")
            library.build()
        torch.ops.load_library(file)
    except library.BuildError as error:
        log.debug("The build failed.", exc_info=True)
        return f"They cannot be built ({error})."
    except OSError as error:
        log.debug("The library was not loaded.", exc_info=True)
        return f"They cannot be loaded ({error}). They need torch 2.11 or newer."
    return None
