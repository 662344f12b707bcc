"""Check that a checkpoint is complete and plausible, before a model is built from it."""

import os
import pickle
import re
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import convert_and_load_state_dict_in_model
from transformers.utils import logging as transformers_logging

from mrp_lightning.errors import FormatError, OptionError, SaveError, TargetError
from mrp_lightning.memory import is_out_of_memory
from mrp_lightning.models.checkpoint import build_without_weights, directory_of, weight_files
from mrp_lightning.upstream.torch_names import without_compiled
from mrp_lightning.upstream.transformers_names import loading_weights_by

_NO_PICKLE = "it is no whole pickle of tensors alone, and only such are read"


def read_pickle(file: str | os.PathLike[str], classes: Sequence[type] = ()) -> Any:
    """Load the tensors and plain containers in a file of `torch.save`, without running its code.

    Tensors of the subclasses `classes` are allowed, too. All are on the CPU, memory-mapped if the
    file is an archive.

    Raises:
        FormatError: The file is compressed, so that its memory-mapped bytes would not be weights.
            `torch.load` raises more, such as `UnpicklingError` for other objects.
    """
    # Only an archive can be mapped: its entries are stored, not compressed, so that their bytes in
    # the file are the weights.
    is_archive = zipfile.is_zipfile(file)
    if is_archive:
        with zipfile.ZipFile(file) as archive:
            if any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist()):
                raise FormatError("it is compressed, and `torch.save` compresses nothing")
    with torch.serialization.safe_globals(list(classes)):
        return torch.load(file, weights_only=True, mmap=is_archive, map_location="cpu")


def why_no_pickle(file: Path) -> str | None:
    """Return why `read_pickle` refuses a file, `None` if it does not."""
    try:
        read_pickle(file)
    except pickle.UnpicklingError as error:
        called = re.search(r"GLOBAL ([\w.]+)", str(error))
        if called is None:
            return _NO_PICKLE
        return (
            f"it is a pickle that calls {called[1]}, which was not run. If you trust its source, "
            "save the model there as safetensors"
        )
    except (EOFError, FormatError, RuntimeError) as error:
        return str(error).splitlines()[0] if str(error) else "it is empty or cut off"
    except Exception:  # of any type: torch's unpickler does not check that a file is a pickle
        return _NO_PICKLE
    return None


_MOST_MODULES = 4096
"""The largest plausible number of layers, blocks or experts of one kind; published models have some
hundreds."""
_MOST_LABELS = 10**6
_COUNT = re.compile(r"(layers?|blocks?|depths?|experts|stages|levels|attention_types)$")
_FREE = 2**28
"""The number of weights that a model may have beyond its files, for computed tables."""


def check_values(values: Any, source: str | os.PathLike[str]) -> None:
    """Raise for a `config.json` that would make transformers loop for ever, or fetch code.

    Raises:
        FormatError: The file holds no object, or implausible values; the message lists all.
    """
    if not isinstance(values, Mapping):
        raise FormatError(
            f"`model`: {source}: expected config.json to hold an object, got a "
            f"{type(values).__name__}. Fetch it again."
        )
    if problems := list(_problems(values, "")):
        listed = "\n".join(f"  {problem}" for problem in problems)
        raise FormatError(
            f"`model`: the configuration of {source} is of no model that could be built. Fetch it "
            f"again, or correct it:\n{listed}"
        )


def _problems(values: Mapping[Any, Any], above: str) -> Iterator[str]:
    for key, value in values.items():
        name = f"{above}{key}"
        if isinstance(value, Mapping):
            yield from _problems(value, f"{name}.")
            continue
        most = _MOST_LABELS if key == "num_labels" else _MOST_MODULES
        # The keys are matched by their ends, since each family has its own: `num_hidden_layers`,
        # `n_layers`, `encoder_layers`, `depths`. A list holds counts of several parts.
        is_count = key == "num_labels" or _COUNT.search(str(key))
        if is_count and (largest := max(_integers(value), default=0)) > most:
            yield f"`{name}` is {largest:,}, expected at most {most:,}"
        if key == "quantization_config" and value is not None:
            yield f"`{name}` is a {type(value).__name__}, expected an object"
        if str(key).endswith("attn_implementation") and isinstance(value, str) and "/" in value:
            yield f"`{name}` is {value!r}: code of the hub, which no checkpoint may ask for"


def _integers(value: Any) -> Iterator[int]:
    if isinstance(value, list | tuple):
        for item in value:
            yield from _integers(item)
    elif isinstance(value, int):
        yield value


def check_files(directory: Path, model: nn.Module) -> None:
    """Apply `check_size` to the files in a directory, if it holds weights."""
    if files := weight_files(directory):
        check_size(model, sum(file.stat().st_size for file in files), directory)


def check_size(
    model: nn.Module,
    num_bytes: int,
    source: str | os.PathLike[str],
    *,
    is_packed: bool | None = None,
) -> None:
    """Raise if a model has far more weights than its files can hold.

    Args:
        model: The model on the meta device, where it takes no memory.
        num_bytes: The size of these files. A weight takes at least a byte, or a bit if it is packed
            or quantized.
        source: The location of the files, for the message.
        is_packed: Whether weights are packed or quantized; `None` asks the model's configuration.

    Raises:
        FormatError: The files are too small to hold the weights.
    """
    # Tied weights count once: a file stores them once.
    # The bound is one of plausibility, n ≤ 8·bytes or n ≤ bytes, plus the tables that a model
    # computes: it shall refuse a configuration of terabytes, not measure a file.
    tensors = {id(t): t for t in (*model.parameters(), *model.buffers())}.values()
    needed = sum(tensor.numel() for tensor in tensors)
    if is_packed is None:
        config = getattr(model, "config", None)
        is_packed = getattr(config, "quantization_config", None) is not None
    if needed > num_bytes * (8 if is_packed else 1) + _FREE:
        raise FormatError(
            f"`model`: by its configuration, {source} is a model of {needed:,} weights, but its "
            f"files hold {num_bytes:,} bytes. They are not those of one model: fetch them again."
        )


def misfits(
    source: str | os.PathLike[str], model: PreTrainedModel, loading: Mapping[str, Any]
) -> str | None:
    """Return how the weights of a checkpoint differ from those of its model, or `None`.

    `loading` is the information that `from_pretrained(output_loading_info=True)` returns.
    """
    # Wrong shapes come before missing names: they show that the configuration is of another model,
    # and a wrong configuration makes names missing as well.
    if mismatched := sorted(loading["mismatched_keys"]):
        shapes = (f"{name} {tuple(a)}, not {tuple(b)}" for name, a, b in mismatched)
        return (
            f"the checkpoint {source} has weights of other shapes than its configuration gives "
            f"{type(model).__name__}: {'; '.join(shapes)}. They are not of one model: fetch them "
            "again."
        )
    if missing := sorted(loading["missing_keys"]):
        return (
            f"the checkpoint {source} lacks weights of {type(model).__name__}, which would be "
            f"random: {', '.join(missing)}. Fetch the files again, or name their own class in "
            "`architectures` of config.json."
        )
    return larger(source, model, loading["unexpected_keys"])


RECOMPUTED = re.compile(r"rotary_emb\.inv_freq$|\bmasked_bias$|\b(attn|attention)\.bias$")
"""Names of tensors in old files that transformers computes anew, if a model lacks them."""


def left_out(
    source: str | os.PathLike[str], model: PreTrainedModel, names: Iterable[str]
) -> str | None:
    """Return which tensors of a checkpoint its model has no place for, `None` if it has all.

    Blocks for multi-token prediction, and buffers that transformers computes anew, do not count.

    Args:
        source: The location of the checkpoint.
        model: The model.
        names: The names of the tensors that loading did not use.
    """
    counts = _blocks_of(model)

    def is_of_further_block(name: str) -> bool:  # `larger` refuses more than the family has
        places = (*_places(name), *_places(f"{model.base_model_prefix}.{name}"))
        # A list that the model does not have gives index + 1, so that the comparison is false.
        return any(index >= counts.get(blocks, index + 1) for blocks, index in places)

    lost = [n for n in sorted(names) if not RECOMPUTED.search(n) and not is_of_further_block(n)]
    if not lost:
        return None
    kind, more = type(model).__name__, f" and {len(lost) - 5} more" if len(lost) > 5 else ""
    return (
        f"the checkpoint {source} holds tensors that its class {kind} has no place for, and that "
        f"would be lost: {', '.join(lost[:5])}{more}. Name the class that has them in "
        "`architectures` of its config.json. If they may be lost, let transformers write the rest: "
        f"`{kind}.from_pretrained({str(source)!r}).save_pretrained(DIRECTORY)`, and give that."
    )


def check_saved(model: PreTrainedModel, directory: str | os.PathLike[str]) -> None:
    """Check a newly written directory by loading it, on the meta device, with its model's class.

    Only the headers of the files are read. transformers converts names and stacked experts as in
    any loading.

    Raises:
        SaveError: Weights of the class are missing in the files, or have other shapes there.
    """

    def load_weights(built: PreTrainedModel, _: Any, files: Any, loading: Any, *__: Any) -> Any:
        """Replace the step of `from_pretrained` that reads the weights."""
        stored: dict[str, Tensor] = {}
        for file in files:
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118 (no mapping)
                    shape = opened.get_slice(name).get_shape()
                    stored[name] = torch.empty(shape, device="meta")
        on_meta = replace(loading, device_map={"": "meta"})
        return convert_and_load_state_dict_in_model(built, stored, on_meta)

    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()  # the error below lists the weights
    try:
        with loading_weights_by(load_weights), without_bars(), torch.inference_mode(False):
            loaded: Any = type(model).from_pretrained(
                directory, output_loading_info=True, ignore_mismatched_sizes=True
            )
    finally:
        transformers_logging.set_verbosity(verbosity)
    if problem := misfits("that was written", *loaded):
        raise SaveError(f"what was written would not load: {problem} {_REPAIR}")


_REPAIR = "Change the modules of the model or its `config`, so that the one fits the other."


def check_class(model: PreTrainedModel) -> None:
    """Raise, before any work, if a model has other weights than its class and configuration give.

    Such a model was modified after its construction, and no checkpoint of it would load.

    Raises:
        SaveError: Weights of the class are missing in the model, or have other shapes there.
    """
    if getattr(model.config, "quantization_config", None) is not None:
        return  # packed weights have other shapes, and cannot be pruned anyway
    # A copy, since building a model writes into its configuration, such as the attention kernel.
    built = build_without_weights(deepcopy(model.config), kind=type(model))
    shapes = {without_compiled(name): x.shape for name, x in model.state_dict().items()}
    wrong = [
        f"{name} {tuple(x.shape)}, which the model "
        + (f"holds as {tuple(shapes[name])}" if name in shapes else "has not")
        for name, x in built.state_dict().items()
        if shapes.get(name) != x.shape
    ]
    if wrong:
        more = f"; and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        raise SaveError(
            f"The pruned model could not be saved so that it loads again: by its `config`, a "
            f"{type(model).__name__} has the weights {'; '.join(wrong[:5])}{more}. {_REPAIR}"
        )


@contextmanager
def without_bars() -> Iterator[None]:
    """Hide the progress bars that transformers shows while it loads weights."""
    hook = transformers_logging.set_tqdm_hook(lambda _, args, __: args[0])
    try:
        yield
    finally:
        transformers_logging.set_tqdm_hook(hook)


def larger(
    source: str | os.PathLike[str], model: PreTrainedModel, names: Iterable[str]
) -> str | None:
    """Return how a checkpoint's model is larger than its configuration says, `None` if it is not.

    `names` are the names of the checkpoint's tensors: all, or those that the model lacks.
    """
    if not (surplus := list(_surplus(model, names))):
        return None
    return (
        f"the checkpoint {source} is of a larger model than its configuration makes: "
        f"{'; '.join(surplus)}. The rest would be left out. Correct the configuration (such as "
        "`num_hidden_layers`), or fetch the files again."
    )


def _surplus(model: PreTrainedModel, names: Iterable[str]) -> Iterator[str]:
    """Yield, for each list of blocks, how many more blocks a checkpoint holds than the model.

    Other tensors that the model lacks, such as old buffers, do not count; nor do the blocks for
    multi-token prediction that follow the last block in some families.
    """
    made = _blocks_of(model)
    surplus: dict[str, set[int]] = {}
    further = getattr(model.config, "num_nextn_predict_layers", None) or 0
    for name in names:
        # The names in a checkpoint of the base model lack the first part.
        for blocks, index in (*_places(name), *_places(f"{model.base_model_prefix}.{name}")):
            # Lists that the model lacks altogether are no surplus: index ≥ index + 1 is false.
            if index >= made.get(blocks, index + 1) + further:
                surplus.setdefault(blocks, set()).add(index)
    for blocks, indices in sorted(surplus.items()):
        yield f"{made[blocks]} of `{blocks}`, and the files hold {len(indices)} more"


def _blocks_of(model: nn.Module) -> dict[str, int]:
    """Return the number of blocks in each list of a model, by the list's name."""
    counts: dict[str, int] = {}
    for name in model.state_dict():
        for blocks, index in _places(name):
            counts[blocks] = max(counts.get(blocks, 0), index + 1)
    return counts


def _places(name: str) -> Iterator[tuple[str, int]]:
    """Yield the lists of blocks that contain a tensor, by its name, with the index in each."""
    for part in re.finditer(r"\.(\d+)(?=\.)", name):
        yield name[: part.start()], int(part[1])


def not_loaded(source: str, error: Exception) -> str:
    """Return the message for a source that transformers refuses, with its reason."""
    reason = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
    return f"`model`: {source} cannot be loaded. {reason}"


@contextmanager
def explained_damage(source: str, revision: str | None) -> Iterator[None]:
    """Replace unexpected errors of loading a model by one that names the damaged files, if any.

    Raises:
        FormatError: The model cannot be loaded.
    """
    try:
        yield
    except Exception as error:  # of any type: transformers does not check files
        # The files are examined only after an error, since reading all headers takes time, and
        # pickles have to be unpickled. Errors with a message of their own pass, as does a lack of
        # memory, which is no damage.
        is_ours = isinstance(error, OSError | ImportError | FormatError | OptionError | TargetError)
        if is_ours or is_out_of_memory(error):
            raise
        directory = directory_of(source, revision)
        damaged = {} if directory is None else damaged_files(directory)
        if not damaged:
            raise FormatError(not_loaded(source, error)) from error
        listed = "\n".join(f"  {file}: {reason}" for file, reason in damaged.items())
        raise FormatError(
            f"`model`: {len(damaged)} of the files with the weights of {source} cannot be read. "
            f"Fetch or write them again:\n{listed}"
        ) from error


def damaged_files(directory: Path) -> dict[str, str]:
    """Return why weight files in a directory cannot be read, by file name; empty if all can.

    Only the headers of safetensors files are read.
    """
    reasons = {}
    for file in sorted((*directory.glob("*.safetensors"), *directory.glob("pytorch_model*.bin"))):
        reason = _why_no_safetensors(file) if file.suffix == ".safetensors" else why_no_pickle(file)
        if reason is not None:
            reasons[file.name] = reason
    return reasons


def _why_no_safetensors(file: Path) -> str | None:
    try:
        with safe_open(file, framework="pt"):
            return None
    except SafetensorError as error:
        size = file.stat().st_size
        return f"its {size:,} bytes are no whole safetensors file ({error})"


@contextmanager
def explained_checkpoint(path: Any, *, weights_only: bool = True) -> Iterator[None]:
    """Explain errors of reading a Lightning checkpoint, a path or URL, in this context.

    Args:
        path: The checkpoint.
        weights_only: Whether only tensors and plain containers are read; other objects explain an
            error only then.

    Raises:
        FormatError: The file is damaged, no Lightning checkpoint, or holds objects that may not be
            unpickled.
    """
    try:
        yield
    except FormatError:
        raise
    except Exception as error:  # only an unreadable file is explained; other errors pass
        reason = None
        if isinstance(path, str | Path) and Path(path).is_file():
            # A file that reads well here leaves `reason` empty: the error has another cause, and
            # passes. So it does with an archive that was read whole, other objects included.
            reason = why_no_pickle(Path(path))
            if reason is None:
                reason = why_no_checkpoint(read_pickle(path))
            elif not weights_only and zipfile.is_zipfile(path):
                reason = None
        elif isinstance(error, pickle.UnpicklingError):
            reason = "it holds more than tensors and plain containers, and only these are read"
        if reason is None:
            raise
        raise FormatError(f"`ckpt_path`: {path} cannot be read: {reason}.") from error


def why_no_checkpoint(content: Any) -> str | None:
    """Return why the content of a file is no Lightning checkpoint, `None` if it is one."""
    keys = ("state_dict", "pytorch-lightning_version")
    if isinstance(content, dict) and all(key in content for key in keys):
        return None
    return f"it is no checkpoint of Lightning, which has {' and '.join(keys)}"
