"""The command line: LightningCLI's commands (`predict` prunes), and further commands."""

import gc
import os
import shlex
import signal
import sys
from collections.abc import Callable
from importlib import import_module
from types import ModuleType

from mrp_lightning.commands.command import exit_on_mistake, nearest
from mrp_lightning.environment import __version__, extra
from mrp_lightning.errors import MISTAKE, OptionError, ended_by

_OF_LIGHTNING = {
    "predict": "prune a model with all options, by Lightning's command line",
    "test": "measure the perplexity of a model",
    "validate": "the same on the validation text",
    "fit": "train a model, or train a pruned one on",
}

_COMMANDS = {
    "prune": ("mrp_lightning.commands.prune", "prune a model, and compare it with the dense one"),
    "distill": (
        "mrp_lightning.commands.distill",
        "train what a pruning kept to predict as the dense model",
    ),
    "layers": (
        "mrp_lightning.commands.layers",
        "list what would be pruned in a model, and what would not",
    ),
    "zeroshot": ("mrp_lightning.commands.zeroshot", "run tasks of lm-eval on a model"),
    "report": ("mrp_lightning.experiments.report", "make a page about a run, or about many"),
    "sweep": ("mrp_lightning.experiments.sweep", "make many runs and tables of them"),
    "export": ("export.to_sparse", "pack a pruned checkpoint, and prove it equal"),
    "gguf": ("export.to_gguf", "write a pruned checkpoint as a GGUF file, for llama.cpp"),
    "generate": ("export.generate", "let a packed or dense model write, and report its speed"),
}
"""The module whose `main` is a command, imported when the command is run, and its help text."""


def main(args: list[str] | None = None) -> None:
    """Run the command of `args`, by default the command line of the process.

    Raises:
        SystemExit: With the status of `exit_on_mistake`, 0 after help, and 143 after SIGTERM, even
            where Lightning would return 0.
    """
    words = sys.argv[1:] if args is None else args
    if args is None and not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
        # Before torch is loaded. libgomp's threads wait for each other in a loop of 300,000 turns,
        # some ten milliseconds; if other work leaves too few cores, it occupies the core that a
        # slower thread needs, at each of thousands of products. A caller in Python has its own
        # environment.
        os.environ["GOMP_SPINCOUNT"] = "1000"
    try:
        with exit_on_mistake():
            _run(words, args)
    except SystemExit as end:
        if type(end).__name__ == "SIGTERMException":  # raised by Lightning's loops
            end.code = ended_by(signal.SIGTERM)
        # `args` is given by callers in Python, whose process goes on and needs its collector.
        if args is None and end.code in (ended_by(signal.SIGINT), ended_by(signal.SIGTERM)):
            gc.freeze()  # a final collection may take longer than schedulers wait
        raise


def _run(words: list[str], args: list[str] | None) -> None:
    """Run the command of the first word, or print the list of commands or the version."""
    first = words[0] if words else ""
    if first in ("", "-h", "--help"):
        (sys.stdout if first else sys.stderr).write(_help())
        raise SystemExit(0 if first else MISTAKE)
    if first == "--version":
        sys.stdout.write(f"mrp-lightning {__version__}\n")
        return
    if first.startswith("-"):
        name = next((word for word in words if word in {*_OF_LIGHTNING, *_COMMANDS}), "COMMAND")
        options = shlex.join(word for word in words if word != name)
        raise OptionError(f"the command comes first: `mrp-lightning {name} {options}`.")
    if first in _OF_LIGHTNING:
        _run_lightning(first, args)
    else:
        command_named(first)(words[1:])


def _help() -> str:
    """Return the list of commands, without importing any of them."""
    commands = {name: does for name, (_, does) in _COMMANDS.items()} | _OF_LIGHTNING
    lines = [f"  {name:10}{does}" for name, does in commands.items()]
    return "\n".join(
        [
            "usage: mrp-lightning COMMAND [OPTIONS]   (or python -m mrp_lightning)",
            "",
            "Prune language models after training, without retraining.",
            "",
            "commands, each with its own --help:",
            *lines,
            "",
            "options:",
            "  -h, --help  show this",
            "  --version   show the version",
            "",
        ]
    )


def command_module(name: str) -> ModuleType:
    """Return the module of a command other than LightningCLI's.

    Raises:
        DependencyError: An extra is missing.
    """
    module, _ = _COMMANDS[name]
    with extra("cli", f"`{name}`"):
        return import_module(module)


def command_named(name: str) -> Callable[[list[str]], None]:
    """Return the function that runs a command other than LightningCLI's.

    Raises:
        DependencyError: See `command_module`.
        OptionError: There is no such command.
    """
    if name not in _COMMANDS:
        commands = [*_COMMANDS, *_OF_LIGHTNING]
        raise OptionError(f"there is no command `{name}`. {nearest(name, commands)}")
    main: Callable[[list[str]], None] = command_module(name).main
    return main


def _run_lightning(command: str, args: list[str] | None) -> None:
    from lightning.pytorch.utilities.exceptions import MisconfigurationException

    with extra("cli", "This command"):
        from mrp_lightning.commands.lightning_cli import PruningCLI
    from mrp_lightning.environment import without_bars
    from mrp_lightning.signals import interruptible, unclaimed_signals

    try:
        # From the first file read on, since a trainer handles signals only between batches.
        with interruptible(unclaimed_signals()), without_bars():
            PruningCLI.of(command)(args)
    except MisconfigurationException as error:
        reason = " ".join(str(error).split())
        raise OptionError(f"Lightning refuses this configuration: {reason}") from error
