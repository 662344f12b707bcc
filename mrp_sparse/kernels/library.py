"""The library of compiled kernels for CPUs: its file, its making from the sources, and loading it.

It calls torch through the stable interface alone, so that one file runs with every torch from 2.11
on, and chooses its instructions where it runs. A wheel has it, without the sources. Where these
are, in a checkout, the file is named by their digest, so that one of older sources is never used.

The import needs only the standard library, since a wheel is built by it, too (`hatch_build.py`).
"""

import functools
import hashlib
import importlib.util
import logging
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path

log = logging.getLogger(__name__)

FOLDER = Path(__file__).parent
STEM = "libmrp_kernels"
_TORCH = "0x020b000000000000"
"""The oldest version of torch that the library runs with: 2.11."""
_FLAGS = (
    *("-std=c++20", "-O3", "-fPIC", "-shared", "-fvisibility=hidden"),
    f"-DTORCH_TARGET_VERSION={_TORCH}",
)
_MOST_SECONDS = 600
_UNFINISHED = ".building-"
_lock = threading.Lock()


class BuildError(Exception):
    """The library cannot be built here; the message is one line."""


def sources() -> list[Path]:
    """Return the sources, none in an installation from a wheel."""
    return sorted(path for path in (FOLDER / "cpu").glob("*") if path.suffix in (".h", ".cpp"))


def path() -> Path:
    """Return the file of the library: that of the sources, maybe still to be built, or a wheel's.

    Raises:
        BuildError: There is neither a library nor a source.
    """
    if files := sources():
        # The flags are part of the digest: with other ones the same sources are another library.
        content = b"\0".join([*(file.read_bytes() for file in files), " ".join(_FLAGS).encode()])
        return FOLDER / f"{STEM}-{hashlib.sha256(content).hexdigest()[:12]}.so"
    if built := sorted(FOLDER.glob(f"{STEM}-*.so")):
        return built[0]
    raise BuildError(f"{FOLDER} has neither the library nor its sources: install mrp-sparse again")


def build() -> Path:
    """Return the library, compiled before if it is missing, which takes some 10 s.

    It is written aside and moved when it is whole; those of older sources are deleted.

    Raises:
        BuildError: Linux, torch or a compiler is missing, it fails, or the folder is read-only.
    """
    target = path()
    if target.exists():
        return target
    if sys.platform != "linux":
        raise BuildError(f"the kernels are built on Linux, not on {sys.platform}")
    compiler = shlex.split(os.environ.get("CXX", "g++"))
    if shutil.which(compiler[0]) is None:
        raise BuildError(f"there is no compiler {compiler[0]!r}: install one of C++, such as g++")
    torch = importlib.util.find_spec("torch")
    if torch is None or torch.origin is None:
        raise BuildError("torch, whose headers are needed, is not installed")
    home = Path(torch.origin).parent
    _remove_unfinished()
    try:
        # In the same folder, so that `replace` is an atomic rename: no process loads half a file.
        with tempfile.TemporaryDirectory(dir=FOLDER, prefix=_UNFINISHED) as aside:
            made = Path(aside) / target.name
            command = [
                # The map of prefixes keeps this machine's paths out of a library for wheels.
                *(*compiler, *_FLAGS, f"-ffile-prefix-map={FOLDER}=mrp_sparse/kernels"),
                *("-isystem", str(home / "include"), str(FOLDER / "cpu" / "operators.cpp")),
                *("-o", str(made), f"-L{home / 'lib'}", "-Wl,--as-needed", "-ltorch_cpu"),
            ]
            done = subprocess.run(command, capture_output=True, text=True, timeout=_MOST_SECONDS)
            if done.returncode:
                lines = done.stderr.splitlines() or [f"{compiler[0]} ended by {done.returncode}"]
                reason = next((line for line in lines if "error: " in line), lines[0])
                raise BuildError(f"{reason}: name another compiler in the variable CXX")
            made.replace(target)
    except (OSError, subprocess.SubprocessError) as error:
        raise BuildError(str(error)) from error
    # A process that runs an older library keeps it: on Linux this removes the name alone.
    for old in FOLDER.glob(f"{STEM}-*.so"):
        if old != target:
            old.unlink(missing_ok=True)
    return target


def _remove_unfinished() -> None:
    """Delete the directories of builds whose process was killed: none lives for so long."""
    for aside in FOLDER.glob(f"{_UNFINISHED}*"):
        with suppress(OSError):  # another process may be deleting it, too
            if time.time() - aside.stat().st_mtime > 2 * _MOST_SECONDS:
                shutil.rmtree(aside, ignore_errors=True)


def tag() -> str:
    """Return the wheel's tag: any Python, this kind of machine."""
    return f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"


def load() -> bool:
    """Load the library, whose kernels then run the operators on the CPU; return whether they do.

    In a checkout it is built when that is installed, or by the first call after a source has
    changed. If there is none, one warning gives the reason, and a next step if there is one.
    """
    # The cache alone lets two threads run `_load` at the same time, and both would build.
    with _lock:
        return _load()


@functools.cache
def _load() -> bool:
    import torch

    try:
        if not path().exists():
            log.warning("Compiling the kernels for packed weights, once: some seconds.")
        torch.ops.load_library(build())
        return True
    except (BuildError, OSError) as error:
        reason = f"They cannot be built ({error})."
        if isinstance(error, OSError):
            reason = f"They cannot be loaded ({error}). They need torch 2.11 or newer."
        log.debug("The kernels are not used.", exc_info=True)
    log.warning(
        "Packed weights are unpacked for every product on this CPU, which is slow: there are no "
        "compiled kernels. %s",
        reason,
    )
    return False
