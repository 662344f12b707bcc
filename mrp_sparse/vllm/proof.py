"""A packed directory, checked in vLLM's main process before the workers start.

The workers check each layer whole while they read it (`linear.py`), but an error there comes among
the tracebacks of several processes. Here headers, the places of the values and scales are read, and
no values: that shows files that are cut off or missing, and places that do not fit their values.
"""

import json
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from mrp_ground.errors import FormatError, first_line
from mrp_sparse.formats.packed_format import PackedFormat
from mrp_sparse.vllm.linear import EXPORT_AGAIN, names_of, why_not


def check_directory(directory: Path, form: PackedFormat, modules: Iterable[str]) -> None:
    """Raise if a directory does not hold packed layers whole.

    Args:
        directory: The checkpoint. Without safetensors files there is nothing to check: vLLM itself
            reports that.
        form: The format of the layers.
        modules: Their names.

    Raises:
        FormatError: Files or tensors are damaged or missing; all are listed.
    """
    with ExitStack() as stack:
        files: dict[str, Any] = {}  # by the names of their tensors
        problems = []
        for path in _files(directory):
            try:
                file = stack.enter_context(safe_open(path, "pt"))
                files |= dict.fromkeys(file.keys(), file)
            # ValueError: a zero byte in the name of a file.
            except (OSError, ValueError, SafetensorError) as error:
                problems.append(f"{path.name}: {first_line(error)}")
        # Tensors of a file that cannot be opened would be listed as missing, one by one.
        if files and not problems:
            problems = [*_problems(files, form, sorted(modules))]
    if problems:
        listed = "\n".join(f"  {problem}" for problem in problems)
        raise FormatError(f"{directory} cannot be read whole. {EXPORT_AGAIN}\n{listed}")


def _files(directory: Path) -> list[Path]:
    """Return the files that vLLM will read: those of the index, or else all."""
    index = directory / "model.safetensors.index.json"
    if not index.is_file():
        return sorted(directory.glob("*.safetensors"))
    try:
        names = sorted({*json.loads(index.read_text("utf-8"))["weight_map"].values()})
        return [directory / name for name in names]
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise FormatError(f"{index} is damaged ({first_line(error)}). {EXPORT_AGAIN}") from error


def _problems(files: dict[str, Any], form: PackedFormat, modules: list[str]) -> Iterator[str]:
    """Yield what is wrong with packed layers; `files` are open, by the names of their tensors."""
    for module in modules:
        names = {name: f"{module}.{name}" for name in names_of(form)}
        if missing := [name for name, full in names.items() if full not in files]:
            yield f"{module}: {', '.join(missing)} missing in the files"
            continue
        # Tensors are views of the mapped files: values that nothing accesses are never read.
        tensors = {name: files[full].get_tensor(full) for name, full in names.items()}
        places = tensors[form.places]
        if places.ndim != 2:
            yield f"{module}: {form.places} has {places.ndim} dimensions, expected 2"
            continue
        # A byte of places is eight columns. The last may be fewer, which only the model knows: the
        # workers check that.
        shape = places.shape[0], 8 * places.shape[1]
        if wrong := why_not(form, shape, [*tensors.values()]):
            yield f"{module}: {wrong}"
