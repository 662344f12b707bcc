"""The arguments of a command line and its YAML files, each with its file and line.

jsonargparse keeps no positions, so YAML is read twice. Simple mistakes raise here, before Lightning
and transformers are imported.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, zip_longest
from pathlib import Path

import yaml

from mrp_lightning.errors import OptionError

_MOST_VALUES = 100_000
"""The largest number of values in a file."""
_FILE_OPTION = re.compile(r"-c|--(config|model|data|trainer)")
_GROUPS = ("model", "data", "trainer")
"""The options of a file that may name another file with the options below them."""
_SUFFIXES = (".yaml", ".yml", ".json")


def is_name(value: str) -> bool:
    """Return whether a value of `--model` names a model, and is no configuration or its file."""
    return bool(value) and not value.endswith(_SUFFIXES) and not value.lstrip().startswith("{")


@dataclass(frozen=True)
class Argument:
    """An option of a command line, or a key or an item of one of its files.

    Attributes:
        path: The dotted key, without list indices, `init_args` and the subcommand.
        value: The text of the value, empty for a collection. On a command line it is the next word,
            also after an option that takes no value.
        origin: The file and the line, such as "run.yaml, line 3: "; empty on the command line.
    """

    path: str
    value: str = ""
    origin: str = ""

    @property
    def leaf(self) -> str:
        """The last part of the dotted key."""
        return self.path.rpartition(".")[2]

    @property
    def file(self) -> str:
        """The name of the file, empty for an argument on the command line."""
        return self.origin.rpartition(", line ")[0]


def arguments_given(args: Sequence[str], *, files: bool = True) -> list[Argument]:
    """Return the arguments of a command line in order, with those of files in place of their names.

    Args:
        args: The words of the command line.
        files: Whether `--config` and groups of options may name files, which are then read.

    Raises:
        OptionError: A file is no YAML or no mapping, has a duplicate key, is nested too deeply, or
            expands to too many values.
    """
    arguments: list[Argument] = []
    # A value may follow `=` or be the next word. A word that is a value is visited as an option,
    # too, and dropped unless it starts with dashes.
    for arg, following in zip_longest(args, args[1:], fillvalue=""):
        option, equals, value = arg.partition("=")
        value = value if equals else following
        match = _FILE_OPTION.fullmatch(option) if files else None
        group = (match[1] or "").removeprefix("config") if match else ""
        if match and _is_file(value) and not (group and is_name(value)):
            arguments += _read(Path(value), group, args)
        elif option.startswith("--"):
            path = option[2:].removesuffix("+").replace(".init_args", "")
            arguments.append(Argument(path, value))
    return arguments


def _is_file(value: str) -> bool:
    try:
        return Path(value).is_file()
    except OSError:  # longer than a path may be, such as a mapping
        return False


def _read(file: Path, group: str, commands: Sequence[str]) -> list[Argument]:
    """Return the arguments of a file.

    The number of values is limited: a few lines of aliases of aliases can expand to more values
    than memory holds, and an alias of its own parent to infinitely many.
    """
    try:
        root = yaml.compose(file.read_text("utf-8"), yaml.SafeLoader)
        # `compose` makes nodes, in which an alias is a reference, so that parsing is linear in the
        # file. Only the walk expands them, and it is lazy: `islice` ends it in time.
        arguments = list(islice(_walk(root, group, file, commands), _MOST_VALUES + 1))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or " ".join(str(error).split())
        raise OptionError(f"{file}{line}: no YAML, {problem}.") from error
    except RecursionError:
        raise OptionError(f"{file}: its values are nested too deeply, or in themselves.") from None
    if len(arguments) > _MOST_VALUES:
        raise OptionError(f"{file}: its aliases stand for more than {_MOST_VALUES:,} values.")
    if not isinstance(root, yaml.MappingNode):
        content = "nothing" if root is None else f"a {root.id}"
        raise OptionError(
            f"{file}: expected keys with values, such as `seed: 1`. It holds {content}."
        )
    return arguments


def _walk(
    node: yaml.Node | None, path: str, file: Path, commands: Sequence[str]
) -> Iterator[Argument]:
    """Yield each key of a node and below, and each item of a list."""
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            yield _argument(path, item, item, file)
            yield from _walk(item, path, file, commands)
    elif isinstance(node, yaml.MappingNode):
        _require_different_keys(node, file)
        # A class comes first, so that its arguments can be checked against it.
        for key, value in sorted(node.value, key=lambda pair: pair[0].value != "class_path"):
            # A root key in `commands` is a subcommand's section, and no part of the keys in it.
            is_transparent = key.value == "init_args" or (not path and key.value in commands)
            below = path if is_transparent else f"{path}.{key.value}".lstrip(".")
            argument = _argument(below, key, value, file)
            yield argument
            yield from _walk(value, below, file, commands)
            if below in _GROUPS and argument.value.endswith(_SUFFIXES):
                # A file is relative to the one that names it, and not to the working directory.
                other = file.parent / argument.value
                yield from _read(other, below, commands) if other.is_file() else ()


def _require_different_keys(node: yaml.MappingNode, file: Path) -> None:
    """Raise for two equal keys, which YAML forbids, but loaders accept silently."""
    lines: dict[str, int] = {}
    for key, _ in node.value:
        line = key.start_mark.line + 1
        if isinstance(key, yaml.ScalarNode) and key.value in lines:
            raise OptionError(
                f"{file}, line {line}: the key `{key.value}` is given twice, first in line "
                f"{lines[key.value]}. Keep one of them, with all that belongs to it."
            )
        if isinstance(key, yaml.ScalarNode):
            lines[key.value] = line


def _argument(path: str, key: yaml.Node, value: yaml.Node, file: Path) -> Argument:
    text = value.value if isinstance(value, yaml.ScalarNode) else ""
    return Argument(path, text, f"{file}, line {key.start_mark.line + 1}: ")


_NEEDS = {
    "predict": "a model, and a callback that prunes it: `mrp-lightning predict --model.model=MODEL "
    "--trainer.callbacks=callbacks.MRPCallback --trainer.callbacks.pattern=2:4 "
    "--trainer.callbacks.save_dir=DIR`, or `--config=FILE`",
    **dict.fromkeys(
        ("fit", "validate", "test"), "a model: `--model.model=MODEL` or `--config=FILE`"
    ),
    "sweep": "the models and runs of a sweep: `mrp-lightning sweep --config=FILE`",
}
"""The commands that read YAML files, and the arguments that each needs."""

_OF_FILES = {
    "--model": "a model directory, a hub id, a GGUF file, or a YAML file of what `model` takes",
    "--data": "a YAML file of what `data` takes",
    "--trainer": "a YAML file of what `trainer` takes",
}
"""The options that may name a YAML file with the options below them, and the expected value."""

_OF_A_SWEEP = frozenset({"models", "runs", "base"})
_OF_A_RUN = frozenset({"model", "data", "trainer"})


def check_arguments(command: str, args: Sequence[str]) -> None:
    """Raise for arguments that no run of the command could have, unless they ask for help.

    Raises:
        OptionError: The command reads YAML files, and there are no options, a word belongs to no
            option, or a file is missing, is no YAML, or belongs to another command.
            `arguments_given` raises more.
    """
    if command not in _NEEDS or _asks(args):
        return
    if not args:
        raise OptionError(
            f"`{command}` needs {_NEEDS[command]}. `mrp-lightning {command} --help` lists all."
        )
    _check_words(command, args)
    for option, file in zip(args, [*args[1:], ""], strict=True):
        name, equals, value = option.partition("=")
        value = value if equals else file
        is_file = value.endswith((".yaml", ".yml")) and "://" not in value and "\n" not in value
        if not is_file or Path(value).is_file():
            continue
        if name in ("--config", "-c"):
            raise OptionError(f"`--config`: expected a YAML file. There is no {value}.")
        if name in _OF_FILES:
            raise OptionError(f"`{name}`: there is no {value}. Expected {_OF_FILES[name]}.")
    _check_files(command, arguments_given(args))


def has_sections(args: Sequence[str], commands: Sequence[str]) -> bool:
    """Return whether options or `--config` files have keys below one of `commands`.

    An option that prints the configuration counts, too. `arguments_given` lists the errors.
    """
    if any(arg.startswith("--print_") for arg in args):
        return True
    options = [arg for arg in args if arg not in commands]
    return any(a.path.partition(".")[0] in commands for a in arguments_given(options))


def _asks(args: Sequence[str]) -> bool:
    """Return whether a command line only asks for help or to print the configuration."""
    return any(
        arg in ("-h", "--help") or arg.startswith("--print_") or ".help" in arg.partition("=")[0]
        for arg in args
    )


def _check_words(command: str, args: Sequence[str]) -> None:
    """Raise for words that are no option's value: each option takes one value."""
    option, values = "", [""]
    # The last word is a sentinel, which ends the values of the last option.
    for arg in [*args, "--"]:
        if not arg.startswith("--") and arg != "-c":
            values.append(arg)
            continue
        if words := values[1:]:
            if files := [word for word in words if word.endswith((".yaml", ".yml"))]:
                hint = f"Write {' '.join(f'`--config={file}`' for file in files)}."
            elif option:
                hint = f"Several values are a list: `{option}='[{', '.join(values)}]'`."
            else:
                hint = f"Options are `--NAME=VALUE`; `mrp-lightning {command} --help` lists them."
            raise OptionError(
                f"{', '.join(f'`{word}`' for word in words)}: of no option of `{command}`, each of "
                f"which takes one value. {hint}"
            )
        option, equals, value = arg.partition("=")
        values = [value] if equals else []


def _check_files(command: str, arguments: Sequence[Argument]) -> None:
    """Raise for a sweep's file in a run, and a run's file in a sweep."""
    keys: dict[str, set[str]] = {}
    for argument in arguments:
        if argument.file:
            keys.setdefault(argument.file, set()).add(argument.path.partition(".")[0])
    for file, roots in keys.items():
        if command != "sweep" and len(roots & _OF_A_SWEEP) > 1:
            raise OptionError(
                f"{file} is of a sweep ({', '.join(sorted(roots & _OF_A_SWEEP))}), not of "
                f"`{command}`. Run `mrp-lightning sweep --config={file}`."
            )
        if command == "sweep" and roots & _OF_A_RUN and not roots & _OF_A_SWEEP:
            raise OptionError(
                f"{file} is of one run ({', '.join(sorted(roots & _OF_A_RUN))}), not of a sweep. "
                f"Run `mrp-lightning predict --config={file}`, or name it in a sweep's `base`."
            )
