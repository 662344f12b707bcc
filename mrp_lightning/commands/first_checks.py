"""Checks of LightningCLI's command lines that need no torch: names, models, files, and outputs.

Torch and Lightning take seconds to load, and only then jsonargparse checks the same and more.
"""

import ast
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mrp_lightning.commands.command import check_model, nearest
from mrp_lightning.commands.parser import Given, load_yaml, values_given
from mrp_lightning.errors import MissingFileError, OptionError
from mrp_lightning.pruning.arguments import PruningArguments
from mrp_lightning.storage.outputs import check_output_dir
from mrp_lightning.text.documents import expanded

_COMMON = ("config", "ckpt_path", "data", "model", "print_config", "seed_everything", "trainer")
NAMES: Mapping[str, Sequence[str]] = {
    "fit": (*_COMMON, "lr_scheduler", "optimizer", "weights_only"),
    "validate": (*_COMMON, "verbose", "weights_only"),
    "test": (*_COMMON, "verbose", "weights_only"),
    "predict": (*_COMMON, "return_predictions", "weights_only"),
}
"""The options without a dot of each command, and the keys of its files."""

_CLASSES = {
    "model": ("mrp_lightning.loop.causal_lm.CausalLM",),
    "data": ("mrp_lightning.data.data_module.TextDataModule",),
    "trainer": ("mrp_lightning.loop.trainer.Trainer", "lightning.pytorch.trainer.trainer.Trainer"),
    "callbacks": ("mrp_lightning.callbacks.pruning.PruningCallback",),
}
"""The classes whose arguments are the keys of a group."""

_SAVES = {"predict": ("MRPCallback", "PruningCallback"), "fit": ("SaveModel",)}
"""The callbacks that make their `save_dir`, by the command in which they do."""
_NO_FILES = ("best", "last", "hpc")
"""Values of `ckpt_path` by which Lightning chooses a file itself."""


def check_words(command: str, words: Sequence[str]) -> None:
    """Check the words of a command line, and the files that they name, before torch is loaded.

    Raises:
        OptionError: Names are unknown; all are listed.
        FileNotFoundError: A configuration, a checkpoint or a model does not exist.
        MissingFileError: Files of text do not exist; all are listed.
        FileExistsError: A result may not be written; `check_output_dir` raises more.
    """
    if any(word == "-h" or (word.startswith("-") and "help" in word) for word in words):
        return
    _check_configs(words)
    given = values_given(words)
    callbacks = _callbacks(given)
    _check_names(command, given, callbacks)
    last = {key: value for _, key, value in given}
    if "model.class_path" not in last:
        names = [value for _, key, value in given if key in ("model", "model.model")]
        if names and isinstance(names[-1], str):
            check_model(names[-1], last.get("model.gguf_file"))
    if "data.class_path" not in last:
        _check_files(last)
    checkpoint = last.get("ckpt_path")
    if isinstance(checkpoint, str) and checkpoint not in _NO_FILES and "://" not in checkpoint:
        _require(checkpoint, "ckpt_path", Path.exists)
    if "trainer.fast_dev_run" not in last:
        for name, arguments in callbacks:
            save_dir, overwrite = arguments.get("save_dir"), arguments.get("overwrite")
            if name in _SAVES.get(command, ()) and isinstance(save_dir, str) and not overwrite:
                check_output_dir(save_dir)


def _check_configs(words: Sequence[str]) -> None:
    """Raise if `--config` names a file that does not exist, and is no YAML itself."""
    for word, following in zip(words, [*words[1:], ""], strict=True):
        name, equals, value = word.partition("=")
        value = value if equals else following
        if name in ("--config", "-c") and not value.lstrip().startswith("{"):
            _require(value, "--config", Path.is_file)


def _require(path: str, argument: str, exists: Callable[[Path], bool]) -> None:
    if not exists(Path(path).expanduser()):
        raise FileNotFoundError(f"`{argument}`: there is no file {path} in {Path.cwd()}.")


def _check_files(data: Mapping[str, Any]) -> None:
    """Raise for files of text, or a directory of published texts, that do not exist."""
    given = {name: data.get(f"data.{name}") for name in ("train_files", "eval_files")}
    files = {name: _names(value) for name, value in given.items()}
    expanded({name: [Path(each).expanduser() for each in files[name]] for name in files})
    corpora = data.get("data.corpora_dir")
    if isinstance(corpora, str) and not Path(corpora).expanduser().is_dir():
        raise MissingFileError(f"there is no directory {corpora}.", "corpora_dir")


def _names(value: Any) -> list[str]:
    """Return the names in an argument: a name, or a list of names, also as YAML on one line."""
    if isinstance(value, str) and value.startswith("["):
        value = load_yaml(value)
    return [each for each in (value if isinstance(value, list) else [value]) if type(each) is str]


def _callbacks(given: Iterable[Given]) -> list[tuple[str, dict[str, Any]]]:
    """Return the names of the classes of this package's callbacks, and their arguments."""
    callbacks: list[Any] = []
    for _, key, value in given:
        group, _, name = key.partition(".callbacks.")
        if key == "trainer.callbacks":
            callbacks = [*value] if isinstance(value, list) else [value]
        elif key == "trainer.callbacks+":
            callbacks.append(value)
        elif group == "trainer" and callbacks:
            last = _whole(callbacks[-1])
            arguments = {**(last.get("init_args") or {}), name.partition(".")[0]: value}
            callbacks[-1] = {**last, "init_args": arguments}
    ours = []
    for callback in map(_whole, callbacks):
        package, _, name = str(callback.get("class_path")).rpartition(".")
        if package.partition(".")[0] in ("", "callbacks", "mrp_lightning"):
            given_to_it = callback.get("init_args")
            ours.append((name, given_to_it if isinstance(given_to_it, dict) else {}))
    return ours


def _whole(callback: Any) -> dict[str, Any]:
    """Return a callback as a mapping; its class alone may be given by name."""
    return callback if isinstance(callback, dict) else {"class_path": callback}


def _check_names(
    command: str, given: Iterable[Given], callbacks: Iterable[tuple[str, dict[str, Any]]]
) -> None:
    """Raise an OptionError that lists all unknown names, each with the nearest known one."""
    own = {key.partition(".")[0] for _, key, _ in given if key.endswith(".class_path")}
    unknown = []
    for origin, key, _ in given:
        group, _, rest = key.partition(".")
        name, known = rest.partition(".")[0].removesuffix("+"), _arguments(group)
        if group not in NAMES[command]:
            name, known = group, [*NAMES[command]]
        elif not name or not known or group in own or name in known:
            continue
        where = f"`{key}` in {origin}" if origin else f"`--{key}`"
        unknown.append(f"{where}: there is no `{name}`. {nearest(name, known)}")
    known = [*(field.name for field in fields(PruningArguments)), *_arguments("callbacks")]
    for name, arguments in callbacks:
        if name in _SAVES["predict"]:
            unknown += [
                f"{name} has no argument `{each}`. {nearest(each, known)}"
                for each in arguments
                if each not in known
            ]
    if unknown:
        raise OptionError(" ".join(unknown))


def _arguments(group: str) -> list[str]:
    """Return the names of the arguments of a group's classes, as their sources have them.

    The list is empty if a group is no class's, or if a source is not there.
    """
    names = []
    for path in _CLASSES.get(group, ()):
        module, _, name = path.rpartition(".")
        package, *parts = module.split(".")
        spec = find_spec(package)  # of the package alone: a module's would import its packages
        (root, *_) = (spec and spec.submodule_search_locations) or [""]
        file = Path(root, *parts).with_suffix(".py")
        if not file.is_file():
            return []
        for node in ast.parse(file.read_text("utf-8")).body:
            if isinstance(node, ast.ClassDef) and node.name == name:
                (init,) = [x for x in node.body if getattr(x, "name", "") == "__init__"]
                assert isinstance(init, ast.FunctionDef)
                names += [each.arg for each in (*init.args.args[1:], *init.args.kwonlyargs)]
    return names
