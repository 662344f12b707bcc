"""Files of `torch.save`, of which nothing is run, and which take no more memory than they say."""

import math
import os
import pickle
import re
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mrp_lightning.errors import FormatError

_MOST_SHARED = 8
"""How often the tensors of a file may share the same bytes, on average: tied ones do."""
_NO_PICKLE = "it is no whole pickle of tensors alone, and only such are read"


def read_pickle(file: str | os.PathLike[str], classes: Sequence[type] = ()) -> Any:
    """The tensors and plain containers in a file of `torch.save`. Nothing that it names is run.

    It may hold tensors of further classes, where these are given.

    Raises:
        FormatError: The file is compressed, or its tensors are far larger than it is, as no file is
            that `torch.save` wrote of a model: they would fill the memory.
    """
    require_stored(file)
    with torch.serialization.safe_globals(list(classes)):
        found = torch.load(
            file, weights_only=True, mmap=zipfile.is_zipfile(file), map_location="cpu"
        )
    needed = sum(math.prod(tensor.shape) * tensor.itemsize for tensor in _tensors(found))
    size = Path(file).stat().st_size
    if needed > _MOST_SHARED * size:
        raise FormatError(
            f"its {size:,} bytes cannot be the {needed:,} bytes of its tensors, which repeat values"
        )
    return found


def require_stored(file: str | os.PathLike[str]) -> None:
    """Refuse a compressed archive, of which a small file can fill the memory.

    Raises:
        FormatError: It is one.
    """
    if zipfile.is_zipfile(file):
        with zipfile.ZipFile(file) as archive:
            if any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist()):
                raise FormatError("it is compressed, and `torch.save` compresses nothing")


def _tensors(content: Any) -> Iterator[Tensor]:
    """Yield all tensors in dictionaries, lists and tuples, each of which is looked at once."""
    seen: set[int] = set()
    rest = [content]
    while rest:
        part = rest.pop()
        if isinstance(part, Tensor):
            yield part
        elif isinstance(part, Mapping | list | tuple) and id(part) not in seen:
            seen.add(id(part))
            rest += part.values() if isinstance(part, Mapping) else part


def why_no_pickle(file: Path) -> str | None:
    """The reason why `read_pickle` does not take a file, or `None`."""
    try:
        read_pickle(file)
    except pickle.UnpicklingError as error:
        found = re.search(r"GLOBAL ([\w.]+)", str(error))
        if found is None:
            return _NO_PICKLE
        return (
            f"it is a pickle that calls {found[1]}, which was not run. If you trust where it comes "
            "from, save the model there as safetensors"
        )
    except (EOFError, FormatError, RuntimeError) as error:
        return str(error).splitlines()[0] if str(error) else "it is empty or cut off"
    except Exception:  # torch's own unpickler stumbles over what is no pickle
        return _NO_PICKLE
    return None
