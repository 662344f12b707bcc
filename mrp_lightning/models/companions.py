"""The files beside a checkpoint that hold none of its weights, such as a tokenizer or processor."""

import json
import logging
import shutil
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path, PurePath

from mrp_lightning.storage.files import visible_files

log = logging.getLogger(__name__)

_WEIGHTS = {
    *(".safetensors", ".bin", ".ckpt", ".pt", ".pth", ".h5", ".msgpack", ".onnx", ".gguf"),
    *(".ot", ".tflite", ".npz"),
}
MODULES = "modules.json"
"""The file in which sentence-transformers lists the modules that run one after another. Each has a
directory, `path`; the transformer's is the checkpoint itself."""

VOCABULARIES = frozenset({"vocab.json", "vocab.txt", "spiece.model", "sentencepiece.bpe.model"})
"""Files from which a tokenizer can be loaded that has no `tokenizer*`."""

OF_TOKENIZER = VOCABULARIES | {
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "merges.txt"),
    *("special_tokens_map.json", "added_tokens.json", "chat_template.jinja", "chat_template.json"),
}
"""The files of a tokenizer, which another tokenizer replaces together."""


@dataclass(frozen=True)
class Companions:
    """The files beside a checkpoint, by their paths relative to its directory.

    `outside` has the links to files elsewhere on this machine, each with its target. They are not
    among the `files`: a copy may be published, and a checkpoint could link to any file.
    """

    directory: Path
    files: list[Path]
    outside: dict[Path, Path]

    @property
    def num_bytes(self) -> int:
        """The size of all files."""
        return sum((self.directory / file).stat().st_size for file in self.files)

    def copy_to(self, directory: Path, *, without: Collection[str] = ()) -> None:
        """Copy files that the other directory lacks, but not the paths `without`; warn of links."""
        for file in self.files:
            copy = directory / file
            # A file that exists was written for the new model, as its config.json is.
            if str(file) in without or copy.exists():
                continue
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(self.directory / file, copy)
        lost = [f"{file} → {to}" for file, to in self.outside.items() if str(file) not in without]
        if lost:
            log.warning(
                "%s holds links to files elsewhere, which are not copied: %s. Copy them yourself.",
                *(self.directory, ", ".join(lost)),
            )


def find_companions(directory: Path) -> Companions:
    """List the files beside a checkpoint: all that hold neither weights nor a model of their own.

    A subdirectory with weights holds the same model in another form (`onnx/`), or another model
    (`checkpoint-500/`), and is left out as a whole, unless `modules.json` names it as a module that
    runs after the transformer. Hidden files are left out.
    """
    modules = directories_of_modules(directory)
    files = [file.relative_to(directory) for file in sorted(visible_files(directory))]
    # One file of weights at any depth excludes its whole first directory: the tokenizer next to
    # these weights is that of the other model.
    of_models = {
        file.parts[0]
        for file in files
        if len(file.parts) > 1 and _has_weights(file) and file.parts[0] not in modules
    }
    kept, outside = [], dict[Path, Path]()
    inside = [directory.resolve()]
    if inside[0].parent.name == "snapshots":  # in the hub's cache, every file is a link
        inside.append(inside[0].parents[1] / "blobs")
    for file in files:
        if file.parts[0] in of_models or (len(file.parts) == 1 and _has_weights(file)):
            continue
        # The target decides, not the name: a link in a checkpoint could lead to any file of this
        # machine, and its content would be published with the pruned model.
        target = (directory / file).resolve()
        if any(target.is_relative_to(allowed) for allowed in inside):
            kept.append(file)
        else:
            outside[file] = target
    return Companions(directory, kept, outside)


def _has_weights(file: PurePath) -> bool:
    return file.suffix in _WEIGHTS or file.name.endswith(".index.json")


def directories_of_modules(directory: Path) -> set[str]:
    """Return the first parts of the paths in `modules.json`; none if it is missing or damaged."""
    try:
        modules = json.loads((directory / MODULES).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return set()
    listed = modules if isinstance(modules, list) else []
    paths = [module.get("path") for module in listed if isinstance(module, dict)]
    # "" and "." are the checkpoint itself, whose path has no parts.
    return {part for path in paths if isinstance(path, str) for part in PurePath(path).parts[:1]}
