"""Private names of Lightning, transformers, huggingface_hub, gguf, jsonargparse and argparse."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, get_args

EXPERTS = "_experts_implementation"
"""The attribute of a configuration that selects the kernel of stacked experts. Seen in transformers
5.23. Its public setter, `PreTrainedModel.set_experts_implementation`, needs the model, but
calibration may only have a module that holds experts. Replacement: a public attribute."""


def works_in_children(trainer: Any) -> bool:
    """Return whether a trainer's strategy spawns or forks workers, which have copies of the model.

    Seen in Lightning 2.6, in which only the class of a strategy's launcher shows it. Replacement: a
    property of strategies or launchers.
    """
    from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher

    return isinstance(trainer.strategy.launcher, _MultiProcessingLauncher)


def spawns_workers(trainer: Any) -> bool:
    """Return whether a trainer's strategy starts new interpreters, to which it pickles itself.

    Seen in Lightning 2.6, whose interactive launchers fork. Replacement: as of `works_in_children`.
    """
    return works_in_children(trainer) and not trainer.strategy.launcher.is_interactive_compatible


def predict_data(trainer: Any) -> Any:
    """Return the datamodule or the dataloaders of the present `predict`.

    Seen in Lightning 2.6, whose `trainer.datamodule` is that of an earlier call if the present one
    has dataloaders. Replacement: `trainer.datamodule`, once each call sets it.
    """
    return trainer.predict_loop._data_source.instance


def unwrap_dataloaders() -> None:
    """Remove Lightning's temporary wrappers around methods of dataloader classes.

    After an error Lightning 2.6 leaves the wrappers in place for the rest of the process, and then
    refuses dataloaders whose `batch_size` is a positional argument. Replacement: a
    `finally` in `lightning.fabric.utilities.data._replace_dunder_methods`.
    """
    from lightning_utilities.core.inheritance import get_all_subclasses
    from torch.utils.data import BatchSampler, DataLoader

    for kind in (DataLoader, BatchSampler):
        for loader in {kind, *get_all_subclasses(kind)}:
            for method in ("__init__", "__setattr__", "__delattr__"):
                if original := loader.__dict__.get(f"__old{method}"):
                    setattr(loader, method, original)
                    delattr(loader, f"__old{method}")


def dtypes_kept(model: Any, dtype: Any) -> dict[str, Any]:
    """Return the dtypes that weights keep in a model loaded in `dtype`, by patterns of names.

    Seen in transformers 5.23. Saved weights must have these dtypes. There is no public name.
    """
    return model._get_dtype_plan(dtype)


def conversions_at_loading(model: Any) -> list[Any]:
    """Return the conversions by which transformers made a model's weights from stored tensors.

    Seen in transformers 5.23, whose `save_pretrained` reverts them. They map the tensors of files
    to those of the model. Replacement: `transformers.core_model_loading`, once it has a function of
    the model alone.
    """
    return getattr(model, "_weight_conversions", None) or []


def from_config(kind: Any, config: Any) -> Any:
    """Return a model of a given class, built from its configuration in the configuration's dtype.

    Seen in transformers 5.23, where only the auto classes have a public `from_config`, and they
    know one class for each configuration. Replacement: a public method of `PreTrainedModel`.
    """
    return kind._from_config(config)


@contextmanager
def loading_weights_by(load_weights: Callable[..., Any]) -> Iterator[None]:
    """Replace the loading of weights in `from_pretrained`, which does everything else as usual.

    It locates the files, builds the model on the meta device, computes tensors that no file holds
    (such as rotary tables), ties weights and reports. Seen in transformers 5.23. Replacement: an
    argument that leaves weights in their files. The only one, accelerate's `device_map`, writes
    stacked experts to the disk once more. `load_weights` is called with the built model, its state,
    the names of its files and the loading options, and returns the loading report and `None`.
    """
    from transformers import PreTrainedModel

    name = "_load_pretrained_model"
    original = PreTrainedModel.__dict__[name]
    setattr(PreTrainedModel, name, staticmethod(load_weights))
    try:
        yield
    finally:
        setattr(PreTrainedModel, name, original)


@contextmanager
def hub_away() -> Iterator[None]:
    """Restrict libraries to the hub's cache in this context, as `HF_HUB_OFFLINE=1` does.

    Seen in huggingface_hub 2.4 and datasets 5.2, which read the variable when they are imported,
    and otherwise retry each file for 24 s. Replacement: `local_files_only` of `load_dataset`, once
    it makes no request.
    """
    import datasets.config
    import huggingface_hub.constants

    modules: tuple[Any, ...] = (huggingface_hub.constants, datasets.config)
    were_offline = [module.HF_HUB_OFFLINE for module in modules]
    try:
        for module in modules:
            module.HF_HUB_OFFLINE = True
        yield
    finally:
        for module, is_offline in zip(modules, were_offline, strict=True):
            module.HF_HUB_OFFLINE = is_offline


def bounded_gguf(file: Path) -> Any:
    """Return a reader of a GGUF file that reads arrays at once, and no further than the file's end.

    It raises a `ValueError` if the header promises more values than the file holds.

    Seen in gguf 0.19, whose reader goes on past the end, value after value, as often as the header
    says, which a large number makes endless. It reads a vocabulary token by token: 15 s for the
    300,000 tokens and merges of a Qwen. Replacement: `GGUFReader`, once it does neither.
    """
    return _bounded_reader()(file)


@contextmanager
def bounded_gguf_readers() -> Iterator[None]:
    """Let other packages read GGUF files as `bounded_gguf` does in this context.

    Seen in transformers 5.15, which reads the header of a file four times to load a model.
    Replacement: as for `bounded_gguf`.
    """
    import gguf

    reader = gguf.GGUFReader
    gguf.GGUFReader = _bounded_reader()  # type: ignore[misc]
    try:
        yield
    finally:
        gguf.GGUFReader = reader  # type: ignore[misc]


@cache
def _bounded_reader() -> type[Any]:
    import numpy as np
    from gguf import GGUFReader, GGUFValueType

    class Bounded(GGUFReader):
        def _get(self, offset: int, dtype: Any, count: int = 1, *order: Any, **more: Any) -> Any:
            if type(self.data) is np.memmap:  # whose slices take three times as long as an array's
                self.data = self.data.view(np.ndarray)  # type: ignore[assignment]
            values = super()._get(offset, dtype, count, *order, **more)
            if len(values) < count:
                raise ValueError(f"it ends before the {int(count):,} values at byte {offset:,}")
            return values

        def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
            if raw_type != GGUFValueType.ARRAY or self.byte_order != "I":
                return super()._get_field_parts(orig_offs, raw_type)
            kind, length = self._get(orig_offs, np.uint32), self._get(orig_offs + 4, np.uint64)
            offset, item = orig_offs + 12, GGUFValueType(kind[0])
            if item == GGUFValueType.STRING:
                values = self._strings(offset, int(length[0]))
                indices = list(range(3, 2 + len(values), 2))  # each string follows its length
            elif (dtype := self.gguf_scalar_to_np.get(item)) is not None:
                numbers = self._get(offset, dtype, int(length[0]))
                values = [numbers[i : i + 1] for i in range(len(numbers))]
                indices = list(range(2, 2 + len(values)))
            else:
                return super()._get_field_parts(orig_offs, raw_type)
            size = 12 + sum(value.nbytes for value in values)
            types = [GGUFValueType.ARRAY, item] if values else [GGUFValueType.ARRAY]
            return size, [kind, length, *values], indices, types

        def _strings(self, offset: int, count: int) -> list[Any]:
            """Return the length and the bytes of each string, as views of memory."""
            # transformers lists their bytes, which takes six times as long from an array.
            view = memoryview(self.data)  # type: ignore[arg-type]
            parts: list[Any] = []
            for _ in range(count):
                start = offset + 8
                if start > len(view):
                    raise ValueError(f"it ends before the string at byte {offset:,}")
                length = view[offset:start].cast("Q")
                offset = start + length[0]
                if offset > len(view):
                    raise ValueError(f"it ends before the {length[0]:,} values at byte {start:,}")
                parts += (length, view[start:offset])
            return parts

    return Bounded


def take_alone(parser: Any, group: str, key: str, is_value: Callable[[str], bool]) -> None:
    """Let `--group VALUE`, and `group: VALUE` in YAML, set the option `group.key`.

    `is_value` returns whether a string is such a value, not the name or the content of a file. The
    group was added with `sub_configs`. Seen in jsonargparse 4.53, where the option of a group only
    takes a file with the group's content. Replacement: a public way to accept other values.
    """
    (action,) = (each for each in parser._actions if each.dest == group)
    load = action._load_config

    def load_or_take(value: Any, *more: Any) -> Any:
        return load({key: value} if isinstance(value, str) and is_value(value) else value, *more)

    action._load_config = load_or_take


def take_strings(parser: Any) -> None:
    """Let options that accept strings take the name of a file as it is, and leave the file unread.

    Seen in jsonargparse 4.53, which reads a file that an option names as text, to see whether it
    holds the option's value in YAML, if the option also accepts a class: a checkpoint of 1 GB, at
    every parse. Replacement: a public way to add one option without sub-configurations.
    """
    for action in parser._actions:
        if str in get_args(getattr(action, "_typehint", None)):
            action._enable_path = False


def options_of(parser: Any) -> dict[str, Any]:
    """Return the options of a parser, with their dashes, and the type of each.

    Seen in Python 3.11, and in jsonargparse 4.53, whose parser is a subclass. Messages name the
    option nearest to a mistyped one. Replacement: a public list of a parser's actions.
    """
    return {
        name: getattr(action, "_typehint", action.type)
        for action in parser._actions
        for name in action.option_strings
    }


def option_named(parser: Any, argument: str) -> str | None:
    """Return the option or positional name of an argument in a parser; `None` if there is none.

    Seen in Python 3.11. Messages name a command's option for an argument with another name in the
    code. Replacement: a public list of a parser's actions.
    """
    for action in parser._actions:
        if action.dest == argument:
            return str((*action.option_strings, action.metavar)[0])
    return None
