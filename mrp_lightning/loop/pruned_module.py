"""Save a pruned or trained LightningModule, and keep a pruned one in memory until it is saved."""

import logging
from collections.abc import Mapping
from dataclasses import replace
from os import PathLike
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from weakref import WeakKeyDictionary

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from safetensors import SafetensorError
from safetensors.torch import save_file, save_model
from torch import nn
from transformers import PreTrainedModel

from mrp_lightning.environment import command
from mrp_lightning.errors import FormatError, OptionError, SaveError
from mrp_lightning.journal.journal import Journal, journal_path
from mrp_lightning.journal.manifest import digest
from mrp_lightning.loop.causal_lm import CausalLM
from mrp_lightning.loop.module_parts import (
    checkpoint_root,
    extra_weights,
    language_models,
    streamed_blocks,
)
from mrp_lightning.models.checkpoint import directory_of
from mrp_lightning.models.companions import OF_TOKENIZER, Companions, find_companions
from mrp_lightning.models.loading import stored_dtype, wider_dtypes
from mrp_lightning.models.saving import check_class, save_pretrained, save_streamed
from mrp_lightning.narrowing.blocks import renumbered
from mrp_lightning.records import evaluation
from mrp_lightning.records.grid_file import NAME as GRID
from mrp_lightning.records.grid_file import load_parameters, save_parameters
from mrp_lightning.records.model_card import model_card
from mrp_lightning.records.report import NAME, PruningReport
from mrp_lightning.solver.grid import GridParameters
from mrp_lightning.storage.files import OTHER_WEIGHTS, output_path, visible_files
from mrp_lightning.storage.outputs import check_output_dir, save_directory
from mrp_lightning.targets.blocks import named_modules
from mrp_lightning.targets.layers import layers_of, why_not_plain
from mrp_lightning.upstream.torch_names import without_compiled

log = logging.getLogger(__name__)


def check_save_dir(
    directory: str | PathLike[str],
    module: LightningModule,
    *,
    overwrite: bool,
    dtype: torch.dtype | None = None,
    journal_bytes: int = 0,
    argument: str = "save_dir",
) -> None:
    """Raise before any work if `_save_pruned` or `save_trained` could not write.

    The weights take the room of `dtype`, by default that of the checkpoint.

    Raises:
        OptionError: transformers refuses the `generation_config`. `check_output_dir` raises more.
        SaveError: The saved model would not load; see `check_class`.
    """
    model = checkpoint_root(module)[1]
    other_bytes = sum(tensor.nbytes for tensor in extra_weights(module).values())
    companions = _companions(module)
    other_bytes += companions.num_bytes if companions else 0
    check_output_dir(
        directory,
        overwrite=overwrite,
        argument=argument,
        sources=_sources_of(module),
        num_bytes=num_bytes(model, dtype) + journal_bytes + other_bytes,
    )
    if isinstance(model, PreTrainedModel):
        check_class(model)
        if model.can_generate():
            _check_generation(model)


def journal_bytes(save_dir: str | PathLike[str], module: LightningModule, *, whole: bool) -> int:
    """Return the bytes that a journal may add to the disk: the weights minus its present shards.

    The journal of a streamed model adds nothing if blocks stay `whole` and keep their dtype, since
    its shards then become files of the checkpoint.
    """
    model: Any = checkpoint_root(module)[1]
    if whole and streamed_blocks(module) is not None and model.dtype == stored_dtype(model):
        return 0
    # A resumed run has shards on the disk already, which count as used space there.
    shards = sum(file.stat().st_size for file in journal_path(save_dir).glob("*.safetensors"))
    weights = sum(p.numel() * p.element_size() for p in module.parameters())
    return max(0, weights - shards)


def _check_generation(model: PreTrainedModel) -> None:
    """Raise if transformers would refuse to write the generation config."""
    # transformers checks only while it writes, so that a trial is the only sure test.
    with TemporaryDirectory() as directory:
        try:
            model.generation_config.save_pretrained(directory)
        except ValueError as error:
            raise OptionError(
                "The model could not be saved: transformers refuses its `generation_config`. Mend "
                f"`model.generation_config` first. {error}"
            ) from error


class PrunedModule:
    """A pruned module that is not saved yet, or was never to be.

    `grid` has the parameters of layers on the grid of an engine, by the names of layers. `save`
    makes the report complete, and then removes the journal.
    """

    def __init__(
        self,
        module: LightningModule,
        report: PruningReport,
        grid: Mapping[str, GridParameters],
        journal: Journal | None,
    ) -> None:
        self.report, self._grid, self._module, self._journal = report, grid, module, journal
        _sources_of(module)  # before the working directory changes
        self._digest = _digest(module)

    def is_of(self, module: LightningModule) -> bool:
        """Return whether a LightningModule holds this model object."""
        return checkpoint_root(module)[1] is checkpoint_root(self._module)[1]

    def save(self, directory: str | PathLike[str], *, overwrite: bool) -> None:
        """Write the model with its report, in process 0; complete the report, remove the journal.

        Raises:
            OptionError: The weights were changed since they were pruned.
            SaveError: The directory could not be written, or may not be replaced.
        """
        # The digest is compared, not a flag of changes: weights can change without this object.
        if _digest(self._module) != self._digest:
            raise OptionError(
                "The weights were changed since they were pruned, and the report is of the pruned "
                "ones. Prune again, or save the model as it is now without a report: "
                "`model.save_pretrained(directory)`, or `callbacks.SaveModel` in `fit`."
            )
        try:
            if rank_zero_only.rank == 0:  # type: ignore[attr-defined]
                # A copy: the report in memory becomes complete only if the directory is written.
                written = replace(self.report, complete=True)
                _save_pruned(self._module, directory, written, self._grid, overwrite=overwrite)
                self.report.files = written.files
        except (OSError, SafetensorError) as error:
            reason = str(error).removesuffix(".")
            raise SaveError(
                f"The model is pruned, but could not be saved in {directory}: {reason}. It is "
                "still in memory: `callback.save(directory)` writes it, and so does another "
                "`predict` with this callback, which does not prune again."
            ) from error
        self.report.complete = True
        if self._journal is not None:
            # Last: until the directory is written, the journal is the only copy on the disk.
            self._journal.remove()
            self._journal = None


def _digest(module: LightningModule) -> str | None:
    """Return the digest of the weights to save; `None` if streamed, and outside process 0."""
    if rank_zero_only.rank != 0 or streamed_blocks(module) is not None:  # type: ignore[attr-defined]
        return None
    state = checkpoint_root(module)[1].state_dict()
    # Names without the prefix of `torch.compile`, which may be added after the pruning.
    tensors = {without_compiled(n): x for n, x in state.items() if isinstance(x, torch.Tensor)}
    return digest(tensors.items())


def _save_pruned(
    module: LightningModule,
    directory: str | PathLike[str],
    report: PruningReport,
    grid: Mapping[str, GridParameters],
    *,
    overwrite: bool,
) -> None:
    """Write the model and its report into a directory that appears when it is whole.

    A `PreTrainedModel` becomes a Hugging Face directory, any other module `model.safetensors` with
    the names of its `state_dict`. Weights beside it go into `module.safetensors`.
    """
    _, model = checkpoint_root(module)
    streamed, files = streamed_blocks(module), dict[str, str]()
    with save_directory(directory, overwrite=overwrite, sources=_sources_of(module)) as staging:
        if isinstance(model, PreTrainedModel):
            name = model.name_or_path or None
            card = model_card(report, name, num_bytes=num_bytes(model, None))
            tokenizer = getattr(module, "tokenizer", None)
            if streamed is None:
                save_pretrained(model, staging, tokenizer=tokenizer, card=card)
            else:
                files = save_streamed(model, streamed, staging, tokenizer=tokenizer, card=card)
            _copy_companions(module, staging)
        else:
            save_model(model, str(staging / "model.safetensors"))
            card = model_card(report, type(model).__name__, library=None)
            (staging / "README.md").write_text(card, encoding="utf-8")
        if extra := extra_weights(module):
            # Copies, since safetensors refuses tensors that share memory.
            tensors = {name: x.detach().clone().contiguous() for name, x in extra.items()}
            save_file(tensors, staging / OTHER_WEIGHTS, metadata={"format": "pt"})
        # The new parameters win: they are of weights that this run put on a grid.
        if parameters := {**_parameters_of_sources(module, report), **grid}:
            save_parameters(parameters, staging / GRID)
        _save_report(report, staging)
    if streamed is not None:
        written = output_path(directory)
        # After the rename of the directory: the blocks are read from their final files.
        streamed.settle({name: written / file for name, file in files.items()})


_OF_ONE_MODEL = frozenset(
    {"config.json", "README.md", NAME, evaluation.NAME, "export_report.json", "report.html"}
)
"""Files beside a checkpoint that describe this one model, and are not true of its pruned copy."""


def _companions(module: LightningModule) -> Companions | None:
    """Return the files beside the checkpoint of the one Hugging Face model of a module, if any."""
    _, model = checkpoint_root(module)
    if not isinstance(model, PreTrainedModel):
        return None
    directory = next(iter(_sources_of(module)), None)
    if directory is None:
        directory = directory_of(model.name_or_path or "", module.hparams.get("revision"))
    return find_companions(directory) if directory is not None and directory.is_dir() else None


def _copy_companions(module: LightningModule, directory: Path) -> None:
    """Copy the files beside the model's checkpoint; another tokenizer's replace the source's."""
    companions = _companions(module)
    if companions is None:
        return
    tokenizer = getattr(module, "tokenizer", None)
    names = {checkpoint_root(module)[1].name_or_path, *map(str, _sources_of(module))}
    is_other = tokenizer is not None and tokenizer.name_or_path not in names
    companions.copy_to(directory, without=_OF_ONE_MODEL | (OF_TOKENIZER if is_other else set()))


def _parameters_of_sources(
    module: LightningModule, report: PruningReport
) -> dict[str, GridParameters]:
    """Return the grid parameters of layers that an earlier pruning quantised and this one kept."""
    parameters: dict[str, GridParameters] = {}
    for source in _sources_of(module):
        try:
            parameters |= load_parameters(source / GRID)
        except FormatError as error:  # the model is pruned by now, and is to be saved
            log.warning("The grid parameters of the model's other layers are lost: %s", error)
    changed = {row.name for row in report.pruned}
    removed = report.narrowed.get("removed")
    if removed:
        changed |= {*report.narrowed["repair"]["layers"]}
    kept = {name: x for name, x in parameters.items() if name not in changed}
    named = {renumbered(name, removed) if removed else name: x for name, x in kept.items()}
    return {name: x for name, x in named.items() if name is not None}


def save_trained(
    module: CausalLM,
    directory: str | PathLike[str],
    *,
    dtype: torch.dtype,
    overwrite: bool,
    steps: int,
    texts: Mapping[str, str],
) -> None:
    """Write a trained model as a Hugging Face directory, which appears when it is complete.

    Beside the model are the files `texts`, by name. If the model was loaded from a pruned
    checkpoint and is still as sparse, the report of its pruning is written, too, with the number of
    optimizer `steps`.
    """
    model, tokenizer = module.model, module.tokenizer
    report, card = _report_of_source(model, model.name_or_path), None
    if report is not None:
        report.provenance["trained"] = {"steps": steps, "command": command()}
        card = model_card(report, report.config.get("base_model"))
    with save_directory(directory, overwrite=overwrite, sources=_sources_of(module)) as staging:
        save_pretrained(model, staging, tokenizer=tokenizer, dtype=dtype, card=card)
        _copy_companions(module, staging)
        for name, text in texts.items():
            (staging / name).write_text(text, "utf-8")
        if report is not None:
            _save_report(report, staging)


def _report_of_source(model: nn.Module, directory: str) -> PruningReport | None:
    """Return the report of a pruned source that a trained model still has the zeros of, or `None`.

    There is none, either, of a source on a grid of few bits.
    """
    file = Path(directory) / NAME
    if not file.is_file():
        return None
    try:
        report = PruningReport.load(file)
    except FormatError as error:  # the model is trained by now, and is to be saved
        log.warning("The report of the model's pruning is lost: %s", error)
        return None
    if report.amount.grids:
        log.warning("The report of the model's pruning is not saved: training leaves few bits.")
        return None
    if report.narrowed:
        return report  # a narrower model cannot regain its removed units
    # At least as many zeros as were removed, layer by layer: training that holds the mask keeps all
    # of them, and may add others.
    removed = {row.name: row.num_removed for row in report.pruned}
    zeros = {
        layer.name: int((layer.weight == 0).sum())
        for name, module in named_modules(model)
        for layer in layers_of(name, module)
        if layer.name in removed and why_not_plain(layer) is None
    }
    is_sparse = all(zeros.get(name, 0) >= count for name, count in removed.items())
    return report if is_sparse else None


def _save_report(report: PruningReport, staging: Path) -> None:
    """Write the report last, with the names of all files."""
    written = (file.relative_to(staging).as_posix() for file in visible_files(staging))
    report.files = sorted({*written, NAME})
    report.save(staging)


def _sources_of(module: LightningModule) -> list[Path]:
    """Return the local sources of a module's language models, as the first call resolves them."""
    for model in language_models(module).values():
        if model not in _SOURCES and (name := model.name_or_path) and Path(name).exists():
            _SOURCES[model] = output_path(name)
    return [_SOURCES[model] for model in language_models(module).values() if model in _SOURCES]


_SOURCES = WeakKeyDictionary[PreTrainedModel, Path]()


def num_bytes(model: nn.Module, dtype: torch.dtype | None = None) -> int:
    """Return the bytes of a model's saved weights, those on the meta device included.

    `dtype` is the type of a `PreTrainedModel`'s floating weights; `None` is that in the checkpoint.
    """
    tensors = (*model.named_parameters(), *model.named_buffers())  # each tied tensor once
    if not isinstance(model, PreTrainedModel):
        return sum(tensor.nbytes for _, tensor in tensors)
    stored = dtype or stored_dtype(model)
    wider = wider_dtypes(model, stored, as_published=dtype is None)
    return sum(
        x.numel() * (wider.get(name, stored) if x.is_floating_point() else x.dtype).itemsize
        for name, x in tensors
    )
