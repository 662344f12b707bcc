"""The command line: LightningCLI (`predict` prunes, `test` gives perplexity), and what it lacks."""

import inspect
import sys
from importlib import import_module
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch import Trainer as LightningTrainer
from lightning.pytorch.cli import LightningCLI, SaveConfigCallback

from mrp_lightning import errors
from mrp_lightning.loop.causal_lm import CausalLM
from mrp_lightning.loop.data_module import TextDataModule
from mrp_lightning.loop.trainer import Trainer


class SaveConfigToLog(SaveConfigCallback):
    """Keep the configuration beside the logs, where there are logs."""

    def setup(self, trainer: LightningTrainer, pl_module: LightningModule, stage: str) -> None:
        """Lightning would write into the working directory when there is no logger."""
        if trainer.logger is not None:
            super().setup(trainer, pl_module, stage)


class PruningCLI(LightningCLI):
    """`fit`, `validate`, `test` and `predict` of a `CausalLM` on a `TextDataModule`."""

    def __init__(self, args: list[str] | None = None, *, run: bool = True) -> None:
        super().__init__(
            CausalLM,
            TextDataModule,
            trainer_class=Trainer,
            save_config_callback=SaveConfigToLog,
            save_config_kwargs={"overwrite": True},
            seed_everything_default=0,
            auto_configure_optimizers=False,
            parser_kwargs={
                "epilog": "More commands, each with its own --help: layers (what would be pruned), "
                "zeroshot (tasks of lm-eval), report (a page on a run), sweep (many runs)."
            },
            args=args,
            run=run,
        )

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """Lightning's, without `--callbacks`: `trainer.callbacks` is the place for them."""
        commands = LightningCLI.subcommands()
        commands["predict"] = commands["predict"] | {"callbacks"}
        return commands


# What a user can put right: shown as a line, not as a traceback.
_USER_ERRORS: tuple[Any, ...] = (
    *(
        error
        for _, error in inspect.getmembers(errors, inspect.isclass)
        if issubclass(error, Exception) and not issubclass(error, Warning)
    ),
    FileExistsError,
    FileNotFoundError,
    PermissionError,
)


# Each is `main` of a module of this package, loaded when it is asked for.
_COMMANDS = ("layers", "zeroshot", "report", "sweep")


def main(args: list[str] | None = None) -> None:
    """Run the command line; a mistake of the user's ends it with one line and status 2."""
    given = sys.argv[1:] if args is None else args
    try:
        if given and given[0] in _COMMANDS:
            import_module(f"mrp_lightning.commands.{given[0]}").main(given[1:])
        else:
            PruningCLI(args)
    except Exception as error:
        message = _user_error(error)
        if message is None:
            raise
        sys.stderr.write(f"error: {message}\n")
        raise SystemExit(2) from error


def _user_error(error: BaseException | None) -> BaseException | None:
    """The user's mistake behind an error; jsonargparse wraps what a constructor raises."""
    while error is not None and not isinstance(error, _USER_ERRORS):
        error = error.__cause__
    return error
