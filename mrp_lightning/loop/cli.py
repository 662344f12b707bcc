"""LightningCLI for a `CausalLM` on a `TextDataModule`."""

from lightning.pytorch import LightningModule
from lightning.pytorch import Trainer as LightningTrainer
from lightning.pytorch.cli import LightningCLI, SaveConfigCallback

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
