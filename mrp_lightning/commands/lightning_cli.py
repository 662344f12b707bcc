"""LightningCLI for a `CausalLM` on a `TextDataModule`, or for classes of the user."""

import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from jsonargparse import Namespace
from lightning.pytorch import LightningModule
from lightning.pytorch import Trainer as LightningTrainer
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from mrp_lightning.callbacks.saving import SaveEvaluation
from mrp_lightning.commands.parser import Parser, is_name, keys_given
from mrp_lightning.data.data_module import TextDataModule
from mrp_lightning.errors import ArgumentError, OptionError
from mrp_lightning.loop.causal_lm import CausalLM
from mrp_lightning.loop.trainer import Trainer, callbacks_that_prune, require_accelerator
from mrp_lightning.models.integrity import explained_checkpoint
from mrp_lightning.records.report import NAME
from mrp_lightning.storage.outputs import check_output_dir
from mrp_lightning.text.documents import expanded, paths_of
from mrp_lightning.text.mixture import ONE_TEXT, exclusive_keys
from mrp_lightning.upstream.other_names import spawns_workers, take_alone

_NO_PRUNING = (
    "`trainer.callbacks`: `predict` prunes, and no callback here does. Add "
    "`--trainer.callbacks=callbacks.MRPCallback --trainer.callbacks.pattern=2:4 "
    "--trainer.callbacks.save_dir=DIR`, or in YAML `trainer: {callbacks: [{class_path: "
    'callbacks.MRPCallback, init_args: {pattern: "2:4", save_dir: DIR}}]}`.'
)


class _SaveConfigToLog(SaveConfigCallback):
    """Save the configuration next to the logs, if there are logs."""

    def setup(self, trainer: LightningTrainer, pl_module: LightningModule, stage: str) -> None:
        """Save only with a logger: without one Lightning writes into the working directory."""
        if trainer.logger is not None:
            super().setup(trainer, pl_module, stage)


class _LightningParser(Parser, LightningArgumentParser):
    """The parser of every command line, with Lightning's additions."""


class PruningCLI(LightningCLI):
    """`fit`, `validate`, `test` and `predict` of a `CausalLM` on a `TextDataModule`.

    With a `class_path`, `model` or `data` can be any LightningModule or LightningDataModule. A
    user's own model without `data` must bring its own dataloaders.

    Args:
        args: The command line; `None` means that of the process.
        run: Whether to run the command, or only to configure it.

    Raises:
        OptionError: The command line or one of its files has a mistake. The methods raise more.
    """

    def __init__(self, args: list[str] | None = None, *, run: bool = True) -> None:
        words = sys.argv[1:] if args is None else args
        # The classes of the parser depend on the arguments, whose keys are therefore read before.
        self._data = keys_given(words, "data")
        own_model = any(key == "class_path" for _, key in keys_given(words, "model"))
        own_data = any(key == "class_path" for _, key in self._data)
        # A user's own model may bring its dataloaders, so text is read for it only if an option of
        # `data` is given.
        of_text = not own_data and (not own_model or bool(self._data))
        super().__init__(
            LightningModule if own_model else CausalLM,
            TextDataModule if of_text else None,
            subclass_mode_model=own_model,
            trainer_class=Trainer,
            save_config_callback=_SaveConfigToLog,
            save_config_kwargs={"overwrite": True},
            seed_everything_default=0,
            auto_configure_optimizers=False,
            parser_class=_LightningParser,
            args=args,
            run=run,
        )

    def add_core_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Accept `--model PATH`, and `model: PATH` in YAML, unless `model` has a `class_path`."""
        super().add_core_arguments_to_parser(parser)
        if not self.subclass_mode_model:
            take_alone(parser, "model", "model", is_name)

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """Return the arguments of each subcommand that are no options."""
        # Lightning's, and the `callbacks` of our `Trainer.predict`: `trainer.callbacks` has them.
        commands = LightningCLI.subcommands()
        commands["predict"] = commands["predict"] | {"callbacks"}
        return commands

    @classmethod
    def of(cls, command: str) -> type["PruningCLI"]:
        """Return the class with the parser of one subcommand alone.

        Parsers of all subcommands list every class of Lightning, and take seconds to make.
        """
        one = {command: cls.subcommands()[command]}
        return type("OneCommand", (cls,), {"subcommands": staticmethod(lambda: one)})

    def instantiate_trainer(self, **kwargs: Any) -> LightningTrainer:
        """Make the trainer; raise an OptionError if Lightning refuses, or workers are spawned."""
        try:
            trainer = super().instantiate_trainer(**kwargs)
        except ArgumentError:  # one of ours, which explains itself
            raise
        except ValueError as error:
            reason = " ".join(str(error).split())
            raise OptionError(f"`trainer`: Lightning refuses it: {reason}") from error
        if spawns_workers(trainer):
            raise OptionError(
                "`trainer.strategy`: this one spawns workers with a copy of the command line, "
                "which cannot be copied. Use `ddp`, which starts the same command once for each "
                "device."
            )
        return trainer

    def _parse_ckpt_path(self) -> None:
        """Read the checkpoint's hyperparameters; raise a `FormatError` if they cannot be read."""
        path = self._value("ckpt_path")
        with explained_checkpoint(path):
            super()._parse_ckpt_path()

    def _value(self, key: str) -> Any:
        """Return the value of a key of the running subcommand, or `None`."""
        return self.config.get(self.config.get("subcommand") or "", self.config).get(key)

    def before_instantiate_classes(self) -> None:
        """Check, before a model is loaded, that `predict` can save a result; keep the last text.

        It raises an OptionError if nothing would be saved, if this machine lacks the accelerator,
        or if one file, or the command line, gives several texts; and a FileExistsError if the
        result may not be written. `check_output_dir` raises more.
        """
        require_accelerator(self._value("trainer.accelerator"))
        if self.config.get("subcommand") == "predict":
            self._require_result()
        data = self._value("data")
        if type(data) is Namespace and "class_path" not in data:
            self._choose_text(data)

    def instantiate_classes(self) -> None:
        """Make model, data and trainer; raise a MissingFileError first for absent files of text."""
        data = self._value("data")
        if type(data) is Namespace and "class_path" not in data:
            expanded({key: paths_of(data.get(key)) for key in ("train_files", "eval_files")})
        super().instantiate_classes()

    def _require_result(self) -> None:
        """Raise for a `predict` without callbacks, or whose pruned model would not be saved."""
        trainer = self._value("trainer")
        if not trainer.callbacks:
            raise OptionError(_NO_PRUNING)
        if not isinstance(trainer.callbacks, list):  # else jsonargparse reports its own errors
            trainer.callbacks = [trainer.callbacks]
        for callback in trainer.callbacks:
            arguments = callback.get("init_args", {})
            # The configuration holds paths of classes, not classes, so that a callback that prunes
            # is recognised by its arguments.
            prunes = {"sparsity", "pattern", "save_dir"} <= {*arguments.keys()}
            if not prunes or trainer.fast_dev_run:
                continue
            if arguments["save_dir"] is None:
                raise OptionError(
                    "`trainer.callbacks.save_dir`: `predict` would prune the model and keep "
                    "nothing of it. Add `--trainer.callbacks.save_dir=DIR`, or "
                    "`--trainer.fast_dev_run=true` to try it out."
                )
            if not arguments.get("overwrite"):  # the checksums of what is replaced are read later
                check_output_dir(arguments["save_dir"])

    def _choose_text(self, data: Namespace) -> None:
        """Let the last text override those of earlier files, as for any other option.

        Two texts of one file, or of the command line, contradict each other, and raise.
        """
        origins = ["the defaults", *(origin for origin, _ in self._data)]
        positions = {key: number for number, (_, key) in enumerate(self._data, start=1)}
        for rule in exclusive_keys(data.get("calibration")):
            groups = [[key for key in group if data.get(key)] for group in rule]
            # jsonargparse lets the last of several values win; here the last of several texts does.
            texts = sorted(
                (max(positions.get(key, 0) for key in keys), keys) for keys in groups if keys
            )
            for position, keys in texts[:-1]:
                last_position, last_keys = texts[-1]
                origin, last_origin = origins[position], origins[last_position]
                if origin == last_origin:
                    raise OptionError(
                        f"{origin or 'the command line'}: {ONE_TEXT}. It names {_named(keys)} and "
                        f"{_named(last_keys)}: keep one."
                    )
                of_file = f" of {last_origin}" if last_origin else ""
                rank_zero_info(
                    f"Text is read by {_named(last_keys)}{of_file}, which was given last: not by "
                    f"{_named(keys)} of {origin or 'the command line'}."
                )
                for key in keys:
                    data[key] = None

    def before_test(self) -> None:
        """Add a callback that records the perplexity in a pruned model's directory, if writable."""
        callbacks: list[Any] = self.trainer.callbacks  # type: ignore[attr-defined]
        is_kept = any(isinstance(callback, SaveEvaluation) for callback in callbacks)
        if is_kept or not isinstance(self.model, CausalLM):
            return
        source = self.model.model.name_or_path
        if not source or not (Path(source) / NAME).is_file():
            return
        if os.access(source, os.W_OK):
            callbacks.append(SaveEvaluation(source))
        else:
            rank_zero_warn(f"{source} is read-only: the perplexity will not be recorded there.")

    def before_predict(self) -> None:
        """Raise an OptionError if no callback of the trainer prunes."""
        if not callbacks_that_prune(self.trainer):
            raise OptionError(_NO_PRUNING)


def _named(keys: Iterable[str]) -> str:
    return ", ".join(f"`data.{key}`" for key in keys)
