"""Models that are larger than memory: blocks stay in files, and are read while they run."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import (
    convert_and_load_state_dict_in_model,
    revert_weight_conversion,
)
from transformers.modeling_utils import LoadStateDictConfig

from mrp_lightning.environment import without_bars
from mrp_lightning.errors import FormatError, OptionError, TargetError
from mrp_lightning.models.checkpoint import names_in_model
from mrp_lightning.models.loading import load_model
from mrp_lightning.models.locations import find_gguf
from mrp_lightning.models.moved_blocks import MovedBlocks, applied_in_place
from mrp_lightning.upstream.other_names import loading_weights_by
from mrp_lightning.upstream.torch_names import APPLY

FindBlocks = Callable[[nn.Module], Mapping[str, nn.Module]]


class Narrowing(Protocol):
    """Makes streamed blocks narrower as they are saved, such as `StreamedNarrowing`."""

    def configured(self) -> AbstractContextManager[None]:
        """Write the new sizes into the configuration in a context."""

    def saved(self, name: str) -> AbstractContextManager[None]:
        """Make a block narrower in a context."""

    def settle(self) -> None:
        """Make all blocks narrower for good."""


_REST = ""
"""The key, in place of a block's name, of the weights that are in no block."""


class StreamedBlocks(MovedBlocks):
    """The blocks of a model, each of which is read from files when it runs, and dropped after it.

    In between a block is on the meta device, and stays there when the model moves. It runs where
    the rest of the model is. transformers converts names, stacked experts and dtypes as it does for
    a whole checkpoint. Reading a file that was changed since it was opened raises a FormatError.

    Args:
        model: The model, without weights.
        blocks: Its blocks, by name.
        files: The safetensors files of its checkpoint.
        loading: The settings by which transformers loads it.

    Attributes:
        shards: Files that hold one block each, by the block's name.
        narrowing: Makes saved blocks narrower; `None` for blocks that stay as wide as they are.

    Raises:
        TargetError: There are no blocks, or their weights are tied to others.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        blocks: Mapping[str, nn.Module],
        files: list[Path],
        loading: LoadStateDictConfig,
    ) -> None:
        super().__init__(blocks.values())
        self.blocks, self.shards = dict(blocks), dict[str, Path]()
        self.narrowing: Narrowing | None = None
        self._model, self._loading = model, loading
        self._names = {module: name for name, module in blocks.items()}
        if not blocks:
            raise TargetError(
                "`streaming` reads one repeated block after another, and none were found in this "
                "model. Load it without `streaming`."
            )
        # A tied weight would be two tensors once blocks are read apart: pruning would break the
        # tie.
        _refuse_tied(model, list(blocks))
        self._identities = {file: _identity(file) for file in files}
        # By block: the names in the checkpoint of the block's tensors, by file.
        self._source = self._find(files)
        self._places = dict(self._source)

    def load_rest(self) -> Any:
        """Load the weights that are in no block; return the loading information of all weights."""
        # 1. All tensors, of blocks as well, are loaded as shapes on the meta device: this gives
        #    missing, unexpected and mismatched names of the whole checkpoint, before any weight is
        #    read.
        # 2. The weights of the rest are read, if these shapes fit.
        shapes: dict[str, Tensor] = {}
        for files in self._places.values():
            with self._opened(files) as stored:
                shapes |= {key: torch.empty(s.get_shape(), device="meta") for key, s in stored}
        elsewhere = replace(self._loading, device_map={"": "meta"})
        loading, _ = convert_and_load_state_dict_in_model(self._model, shapes, elsewhere)
        if not loading.mismatched_keys and not loading.conversion_errors:  # else refused later
            self._read(_REST)
        return loading

    def install(self) -> None:
        """Read every block for its own `forward`, and exclude it from moves of the model.

        A move would lose the weights of a block on the meta device, so only its dtype changes.
        """
        for block in self.blocks.values():
            block.forward = self.brought(block)
            setattr(block, APPLY, applied_in_place(block, stays=lambda tensor: tensor.is_meta))

    def bring(self, block: nn.Module) -> None:
        """Read the weights of a block from its files."""
        # The move follows the conversion: the model may have moved since it was loaded.
        self._read(self._names[block])
        block.to(self._device)

    def take_away(self, block: nn.Module) -> None:
        """Drop the weights of a block, but keep their shapes and dtypes."""
        # `state_dict` lacks non-persistent buffers, which no file holds: they stay.
        for name, tensor in block.state_dict(keep_vars=True).items():
            module, _, key = name.rpartition(".")
            empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
            if isinstance(tensor, nn.Parameter):
                empty = nn.Parameter(empty, requires_grad=tensor.requires_grad)
            setattr(block.get_submodule(module), key, empty)

    def tensors(self, name: str) -> dict[str, Tensor]:
        """Return the tensors of a pinned block, by the names of a checkpoint."""
        state = self.blocks[name].state_dict(prefix=f"{name}.")
        return revert_weight_conversion(self._model, state)

    def take(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        """Load the result of `tensors` into a pinned block."""
        self._convert(name, tensors)
        self.blocks[name].to(self._device)

    def read_from(self, name: str, file: str | PathLike[str]) -> None:
        """Read a block, from now on, from a shard to which its `tensors` were written."""
        self.shards[name] = file = Path(file)
        self._identities[file] = _identity(file)
        with safe_open(file, framework="pt") as opened:
            self._places[name] = {file: list(opened.keys())}

    def settle(self, files: Mapping[str, Path]) -> None:
        """Read blocks, from now on, from the files of a checkpoint."""
        if self.narrowing is not None:
            self.narrowing.settle()
        for name, file in files.items():
            self.read_from(name, file)
        # The saved files become the source, so that a later `start_over` returns to the pruned
        # blocks, not to the dense ones.
        self._source = dict(self._places)
        self.start_over()

    def start_over(self) -> None:
        """Read all blocks, from now on, from the original or last settled files, not shards."""
        self._places = dict(self._source)
        self.shards.clear()
        self.narrowing = None

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield all tensors of the model by name, with one block at a time in memory."""
        yield from self.rest.items()
        for name, block in self.blocks.items():
            with self.pinned(block):
                yield from block.state_dict(prefix=f"{name}.").items()

    @property
    def rest(self) -> dict[str, Tensor]:
        """Return the weights that are in no block, by their names in the model."""
        inside = tuple(f"{name}." for name in self.blocks)
        state = self._model.state_dict()
        return {name: tensor for name, tensor in state.items() if not name.startswith(inside)}

    @property
    def _device(self) -> torch.device:
        return next((t.device for t in self.rest.values()), torch.device("cpu"))

    def _find(self, files: list[Path]) -> dict[str, dict[Path, list[str]]]:
        """Return the names of the tensors of each block, and of the rest, by file."""
        name_in_model = names_in_model(self._model, self._loading.weight_mapping or [])
        places: dict[str, dict[Path, list[str]]] = {name: {} for name in (*self.blocks, _REST)}
        for file in files:
            with safe_open(file, framework="pt") as opened:
                keys = list(opened.keys())
            for key in keys:
                target, _ = name_in_model(key)
                # The dot keeps `layers.1` from taking the tensors of `layers.10`.
                name = next((n for n in self.blocks if target.startswith(f"{n}.")), _REST)
                places[name].setdefault(file, []).append(key)
        return places

    def _read(self, name: str) -> None:
        with self._opened(self._places[name]) as stored:
            self._convert(name, dict(stored))

    @contextmanager
    def _opened(self, files: Mapping[Path, list[str]]) -> Iterator[Iterator[tuple[str, Any]]]:
        """Yield an iterator over names and tensors in files, which are read in this context.

        The files are read, not mapped, since a writable map of a whole file counts as the process's
        own memory (`ulimit -d`). They are checked before and after.
        """
        for file in files:
            _require_unchanged(file, self._identities[file])
        with ExitStack() as stack:
            opened = {
                file: stack.enter_context(safe_open(file, framework="pt", backend="pread"))
                for file in files
            }
            yield (
                (key, opened[file].get_slice(key)) for file, keys in files.items() for key in keys
            )
        for file in files:
            _require_unchanged(file, self._identities[file])

    def _convert(self, name: str, stored: Mapping[str, Any]) -> None:
        """Load tensors of a checkpoint into the model, converted as transformers does.

        `name` is the block's, "" for the rest. Raise a FormatError if names or shapes do not fit.
        """
        # Tensors created in inference mode could have no gradients later.
        with torch.inference_mode(False), torch.no_grad(), without_bars():
            loading, _ = convert_and_load_state_dict_in_model(
                self._model, dict(stored), self._loading
            )
        if loading.conversion_errors or loading.mismatched_keys:
            problems = [*loading.conversion_errors.values(), *map(str, loading.mismatched_keys)]
            raise FormatError(
                f"The weights of {name or 'the model'} are not what they were when the model was "
                "loaded. Load it again.\n" + "\n".join(problems)
            )


def _identity(file: Path) -> tuple[int, int, int]:
    """Return the size of a file, its modification time and its inode."""
    status = file.stat()
    return status.st_size, status.st_mtime_ns, status.st_ino


def _require_unchanged(file: Path, identity: tuple[int, int, int]) -> None:
    """Raise a `FormatError` if the `_identity` of a file has changed."""
    try:
        if _identity(file) == identity:
            return
        change = "was replaced or written to"
    except OSError as error:
        change = f"cannot be read any more ({error.strerror})"
    raise FormatError(
        f"{file} {change} since the model was loaded, and the blocks of two models must not be "
        "mixed. Put back the file that was there, and load the model again: what is in a "
        "journal by now stays, and the same run goes on with it."
    )


def load_streamed(
    source: str, dtype: torch.dtype | None, find_blocks: FindBlocks, **options: Any
) -> tuple[PreTrainedModel, StreamedBlocks]:
    """Load a causal language model whose blocks stay in the safetensors files of its checkpoint.

    The arguments are those of `load_model`; `find_blocks` returns the blocks of the built model.

    Raises:
        OptionError: The weights are not in safetensors files, or packed. `load_model` and
            `StreamedBlocks` raise more.
    """
    if file := find_gguf(source):
        raise _no_safetensors(file.name)
    streamed: list[StreamedBlocks] = []

    def load_weights(model: PreTrainedModel, _: Any, files: Any, loading: Any, *__: Any) -> Any:
        """Replace the step of `from_pretrained` that follows building a model without weights."""
        if loading.hf_quantizer is not None:
            raise OptionError(
                f"`streaming` prunes weights that are matrices, and those of {source} are packed. "
                "Give the dense checkpoint."
            )
        others = [Path(f).name for f in files if not f.endswith(".safetensors")]
        if others:
            raise _no_safetensors(", ".join(others))
        streamed.append(StreamedBlocks(model, find_blocks(model), [*map(Path, files)], loading))
        return streamed[0].load_rest(), None

    with loading_weights_by(load_weights):
        model = load_model(source, dtype, **options)
    streamed[0].install()
    return model, streamed[0]


def _no_safetensors(files: str) -> OptionError:
    return OptionError(
        f"`streaming` reads single weights from safetensors files, and these are not: {files}. "
        "Load the model without `streaming` where it fits into memory, save it with "
        "`save_pretrained`, and give that directory."
    )


def _refuse_tied(model: PreTrainedModel, blocks: list[str]) -> None:
    """Raise a TargetError if weights of blocks are tied, and would have to stay in memory."""
    inside = tuple(f"{name}." for name in blocks)
    pairs = model.all_tied_weights_keys.items()
    tied = [pair for pair in pairs if any(name.startswith(inside) for name in pair)]
    if tied:
        listed = "\n".join(f"  {one} and {other}" for one, other in tied)
        raise TargetError(
            "`streaming` reads each block by itself, and weights of this model's blocks are tied "
            f"to others. Load it without `streaming`. Tied are:\n{listed}"
        )
