"""Where what is named by a directory or a hub id is looked for."""

import os
from pathlib import Path
from typing import Any

from mrp_lightning.environment import why_no_hub


def place_of(source: str | os.PathLike[str]) -> dict[str, Any]:
    """Where `from_pretrained` is to look: a directory, the hub, or its cache if it is away."""
    path = Path(source).expanduser()
    if path.exists():
        return {"pretrained_model_name_or_path": str(path)}
    return {
        "pretrained_model_name_or_path": str(source),
        "local_files_only": why_no_hub() is not None,
    }


def cause(source: str | os.PathLike[str], error: OSError) -> str:
    """Why a source gives nothing: transformers' reason, or that the hub is away."""
    is_here = Path(source).expanduser().exists()
    return str(error) if is_here else why_no_hub() or str(error)


def is_path(source: str) -> bool:
    """Whether a name that does not exist here can only have been meant as a path.

    The hub is then not asked, which takes long where it cannot be reached. `runs/x` has the form of
    a hub id; where there is a directory `runs`, it is taken for a path in it.
    """
    path = Path(source).expanduser()
    starts_like_one = path.is_absolute() or source.startswith((".", "~"))
    return starts_like_one or source.count("/") > 1 or ("/" in source and path.parent.is_dir())
