"""Refuse plain mistakes on a command line before Lightning and transformers are imported."""

from collections.abc import Sequence
from pathlib import Path

from mrp_lightning.cli.arguments_given import Argument, arguments_given
from mrp_lightning.errors import OptionError

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
    """Refuse arguments that no run of this command could have.

    Raises:
        OptionError: There are no options, a word that belongs to none, or a file that is missing,
            is no YAML, gives a key twice, or belongs to another command.
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
    """Return whether a file before the command has sections for commands, as LightningCLI reads."""
    if any(arg.startswith("--print_") for arg in args):
        return True
    options = [arg for arg in args if arg not in commands]
    return any(a.path.partition(".")[0] in commands for a in arguments_given(options))


def _asks(args: Sequence[str]) -> bool:
    """Return whether a command line only asks for help or for a configuration."""
    return any(
        arg in ("-h", "--help") or arg.startswith("--print_") or ".help" in arg.partition("=")[0]
        for arg in args
    )


def _check_words(command: str, args: Sequence[str]) -> None:
    """Refuse words that are no option's value: each option takes one value."""
    option, values = "", [""]
    for arg in args:
        if arg.startswith("--") or arg == "-c":
            _check_values(command, option, values)
            option, equals, value = arg.partition("=")
            values = [value] if equals else []
        else:
            values.append(arg)
    _check_values(command, option, values)


def _check_values(command: str, option: str, values: Sequence[str]) -> None:
    if len(values) < 2:
        return
    words = ", ".join(f"`{word}`" for word in values[1:])
    files = [word for word in values[1:] if word.endswith((".yaml", ".yml"))]
    if files:
        hint = f"Write {' '.join(f'`--config={file}`' for file in files)}."
    elif option:
        hint = f"Several values are written as a list: `{option}='[{', '.join(values)}]'`."
    else:
        hint = f"Options are `--NAME=VALUE`; `mrp-lightning {command} --help` lists them."
    raise OptionError(
        f"{words}: of no option of `{command}`, each of which takes one value. {hint}"
    )


def _check_files(command: str, arguments: Sequence[Argument]) -> None:
    """Refuse a file of a sweep for a run, and a file of a run for a sweep."""
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
