"""Locate a model by its name: a directory, a GGUF file or a hub id; without torch.

Commands check names by this module before they load torch, which takes seconds.
"""

import os
from pathlib import Path

from mrp_lightning.errors import FormatError, OptionError


def require_model(source: str) -> None:
    """Raise for a name that can be no model: neither a model's directory or file, nor a hub id.

    An adapter is refused by `refuse_adapter`.
    """
    if find_gguf(source):
        return
    refuse_adapter(source, "model")
    path = Path(source).expanduser()
    # Local paths are settled before the hub is asked: a misspelt directory would be taken for a hub
    # id, and its error would speak of the network.
    if path.exists() and not (path / "config.json").is_file():
        raise FileNotFoundError(
            f"`model`: {source} holds no config.json. Expected a Hugging Face model directory, or "
            "a .gguf file; a Lightning .ckpt is given as `ckpt_path`."
        )
    if not path.exists() and is_path(source):
        searched = "" if path.is_absolute() else f" in {Path.cwd()}"
        raise FileNotFoundError(
            f"`model`: there is no directory {source}{searched}. Give a model directory that "
            "exists, or a hub id (OWNER/NAME, where OWNER is no directory here)."
        )


def refuse_adapter(directory: str | os.PathLike[str], argument: str = "") -> None:
    """Raise if a directory holds a PEFT adapter, with or without a model beside it.

    With peft installed, transformers would load an adapter in place of the model beside it; without
    peft it would load the model as if there were no adapter. The `argument` that gave the directory
    is in the message of the `FormatError`.
    """
    path = Path(directory).expanduser()
    if not (path / "adapter_config.json").is_file():
        return
    named = f"`{argument}`: " if argument else ""
    has_model = (path / "config.json").is_file()
    company = " beside a model (adapter_config.json)" if has_model else ", and no model"
    unwanted = " If the model is wanted without it, move adapter_config.json away." * has_model
    raise FormatError(
        f"{named}{directory} holds a PEFT adapter{company}. Load it with peft, merge it into its "
        f"base by `merge_and_unload()`, save that, and give its directory.{unwanted}"
    )


def is_path(source: str) -> bool:
    """Return whether a name that does not exist locally can only be a path, not a hub id.

    This saves a request to the hub, which is slow if the hub cannot be reached. `runs/x` has the
    form of a hub id, but counts as a path if there is a directory `runs`.
    """
    path = Path(source).expanduser()
    starts_like_one = path.is_absolute() or source.startswith((".", "~"))
    return starts_like_one or source.count("/") > 1 or ("/" in source and path.parent.is_dir())


def find_gguf(source: str) -> Path | None:
    """Return the GGUF file of a model source; `None` if the source is of another kind.

    The source may be the path of the file, or a directory that holds one GGUF file and no
    `config.json`. An OptionError is raised if it holds several.
    """
    refuse_empty(source)
    path = Path(source).expanduser()
    if path.suffix == ".gguf" and not path.is_dir():
        if not path.is_file():
            raise FileNotFoundError(f"`model`: there is no file {source}. Give one that exists.")
        return path
    # A directory with config.json is a Hugging Face model, even with a GGUF file in it.
    if not path.is_dir() or (path / "config.json").is_file():
        return None
    names = gguf_files(path)
    if len(names) > 1:
        raise OptionError(
            f"`model`: {source} holds {len(names)} GGUF files: {', '.join(names)}. Name one of "
            f"them with `gguf_file`, or give its path: {path / names[0]}."
        )
    return path / names[0] if names else None


def refuse_empty(source: str) -> None:
    """Raise for an empty name, which as a path would be the working directory."""
    if not source.strip():
        raise OptionError(
            f"`model` or `tokenizer` is empty ({source!r}). Name a directory, a hub id or a .gguf "
            "file; the working directory is `.`."
        )


def gguf_files(directory: Path) -> list[str]:
    """Return the names of the GGUF files in a directory."""
    return sorted(file.name for file in directory.glob("*.gguf"))
