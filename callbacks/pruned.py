"""A pruned model in memory, until it is saved."""

from os import PathLike
from typing import Any
from weakref import ref

from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from safetensors import SafetensorError

from mrp_lightning.errors import OptionError, SaveError
from mrp_lightning.journal.journal import Journal
from mrp_lightning.journal.shared import SharedJournal
from mrp_lightning.loop.contents import checkpoint_root
from mrp_lightning.loop.saving import save_pruned
from mrp_lightning.loop.trainer import as_lightning_module
from mrp_lightning.records.report import PruningReport


def _gone() -> None:
    """Stand in for a reference to what is no longer in memory."""


class Pruned:
    """A module that is pruned, and can be saved.

    Args:
        module: The LightningModule.
        journal: What is removed once the model is saved, `None` if there is none.
    """

    def __init__(self, module: LightningModule, journal: Journal | SharedJournal | None) -> None:
        self._kept: LightningModule | None = module
        self._seen = ref(module), ref(checkpoint_root(module)[1])
        self._journal = journal

    def __getstate__(self) -> dict[str, Any]:
        """A copy in another process knows of no model that is let go."""
        return {**vars(self), "_seen": (_gone, _gone)}

    def let_go(self) -> None:
        """Keep the module no longer than others do."""
        self._kept = None

    def _module(self) -> LightningModule | None:
        """The module, or one around its model if only that is still in memory."""
        module, model = (seen() for seen in self._seen)
        if module is None and model is not None:
            module = as_lightning_module(model)
        assert module is None or isinstance(module, LightningModule)
        return self._kept or module

    def is_of(self, module: LightningModule) -> bool:
        """Whether a LightningModule holds this very model."""
        mine = self._module()
        return mine is not None and checkpoint_root(module)[1] is checkpoint_root(mine)[1]

    def save(
        self, directory: str | PathLike[str], report: PruningReport, *, overwrite: bool
    ) -> None:
        """Write the model with its report, which is complete from then on.

        Args:
            directory: The directory that is made; it appears when it is whole.
            report: The report of the run. After an exception it is as complete as before.
            overwrite: Whether what this package wrote there before may be replaced.

        Raises:
            OptionError: The module was let go, and is gone.
            SaveError: It could not be written, or may not be replaced.
        """
        module = self._module()
        if module is None:
            raise OptionError(
                "The pruned model is no longer in memory: it was saved in `save_dir`. Copy that "
                f"directory to {directory}."
            )
        before, report.complete = report.complete, True  # as the file is to say
        try:
            if rank_zero_only.rank == 0:  # type: ignore[attr-defined]
                save_pruned(module, directory, report, overwrite=overwrite)
        except BaseException as error:
            report.complete = before
            if not isinstance(error, OSError | SafetensorError):
                raise
            raise SaveError(
                f"The model is pruned, but could not be saved in {directory}: {error}. It is still "
                "in memory: `callback.save(directory)` writes it, and so does another `predict` "
                "with this callback, which does not prune again."
            ) from error
        if self._journal is not None:
            self._journal.remove()
            self._journal = None
