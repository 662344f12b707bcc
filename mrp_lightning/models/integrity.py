"""Check that the files of a checkpoint are whole, hold tensors alone, and are of one model."""

import inspect
import os
import pickle
import re
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import PreTrainedModel

from mrp_lightning.devices import is_out_of_memory
from mrp_lightning.errors import ArgumentError, DependencyError, FormatError
from mrp_lightning.models.checkpoint import directory_of, weight_files
from mrp_lightning.storage.json_files import read_json

_NO_PICKLE = "it is no whole pickle of tensors alone, and only such are read"
_MOST_MODULES = 4096
"""The largest plausible number of layers or blocks of a kind; published models have hundreds."""
_MOST_EXPERTS = 2**15
"""The largest number of experts, of which the product keys of Doge have 16,384."""
_MOST_LABELS = 10**6
_COUNT = re.compile(r"(layers?|blocks?|depths?|experts|stages|levels|attention_types)$")
_FREE = 2**28
"""The number of weights that a model may have beyond its files, for computed tables."""


def check_values(values: Any, source: str | os.PathLike[str]) -> None:
    """Raise a `FormatError` for a `config.json` by which transformers would loop, or fetch code."""
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
        most = _MOST_EXPERTS if str(key).endswith("experts") else most
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
    """Apply `check_size` to the weights in a directory, and check its `generation_config.json`.

    Raises:
        FormatError: The weights cannot be the model's. The other file is no JSON object, which
            transformers ignores in silence, or its special tokens are no numbers.
    """
    if files := weight_files(directory):
        check_size(model, sum(file.stat().st_size for file in files), directory)
    file = directory / "generation_config.json"
    content = read_json(file, "fetch it again") if file.exists() else {}
    for name in ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id"):
        value = content.get(name)
        ids = value if isinstance(value, list) else [value]
        if any(type(each) is not int for each in ids if each is not None):
            raise FormatError(
                f"{file}: expected in `{name}` the number of a token, or a list of numbers. Got "
                f"{value!r}. Delete the file, or fetch it again."
            )


def check_size(
    model: nn.Module,
    num_bytes: int,
    source: str | os.PathLike[str],
    *,
    is_packed: bool | None = None,
) -> None:
    """Raise a FormatError if a model has far more weights than its files can hold.

    The model is on the meta device, where it takes no memory, and `num_bytes` is the size of the
    files of `source`. `is_packed` is whether weights are packed or quantized; `None` asks the
    model's configuration.
    """
    # A bound of plausibility, n ≤ bytes, or n ≤ 8·bytes where a packed weight may take a bit, plus
    # the tables that a model computes: it shall refuse a configuration of terabytes, not measure a
    # file. Tied weights count once.
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
    if missing := required(type(model), loading["missing_keys"]):
        return (
            f"the checkpoint {source} lacks weights of {type(model).__name__}, which would be "
            f"random: {', '.join(missing)}. Fetch the files again, or name their own class in "
            "`architectures` of config.json."
        )
    return surplus_blocks(source, model, loading["unexpected_keys"])


def required(kind: type[PreTrainedModel], missing: Iterable[str]) -> list[str]:
    """Return the weights that a class cannot do without, sorted, of those that a checkpoint lacks.

    A pooler is none of them where the class has a choice (`add_pooling_layer`): encoders of
    sentences, whose vectors are means of hidden states, are often published without one.
    """
    has_choice = "add_pooling_layer" in inspect.signature(kind.__init__).parameters
    return sorted(name for name in missing if not (has_choice and name.startswith("pooler.")))


RECOMPUTED = re.compile(r"rotary_emb\.inv_freq$|\bmasked_bias$|\b(attn|attention)\.bias$")
"""Names of tensors in old files that transformers computes anew, if a model lacks them."""


def unexpected_tensors(
    source: str | os.PathLike[str], model: PreTrainedModel, names: Iterable[str]
) -> str | None:
    """Return which tensors of a checkpoint its model has no place for, `None` if it has all.

    Of `names`, the tensors that loading did not use, blocks for multi-token prediction and buffers
    that transformers computes anew do not count.
    """
    names = sorted(names)
    # `surplus_blocks` refuses more blocks than the family has.
    further = {name for name, *_ in _tensors_beyond(model, _blocks_of(model), names)}
    lost = [n for n in names if not RECOMPUTED.search(n) and n not in further]
    if not lost:
        return None
    kind, more = type(model).__name__, f" and {len(lost) - 5} more" if len(lost) > 5 else ""
    return (
        f"the checkpoint {source} holds tensors that its class {kind} has no place for, and that "
        f"would be lost: {', '.join(lost[:5])}{more}. Name the class that has them in "
        "`architectures` of its config.json. If they may be lost, let transformers write the rest: "
        f"`{kind}.from_pretrained({str(source)!r}).save_pretrained(DIRECTORY)`, and give that."
    )


def surplus_blocks(
    source: str | os.PathLike[str], model: PreTrainedModel, names: Iterable[str]
) -> str | None:
    """Return how a checkpoint's model is larger than its configuration says, `None` if it is not.

    `names` are the names of the checkpoint's tensors: all, or those that the model lacks.
    """
    made, surplus = _blocks_of(model), dict[str, set[int]]()
    # Some families have blocks for multi-token prediction after the last one.
    further = getattr(model.config, "num_nextn_predict_layers", None) or 0
    for _, blocks, index in _tensors_beyond(model, made, names):
        if index >= made[blocks] + further:
            surplus.setdefault(blocks, set()).add(index)
    if not surplus:
        return None
    listed = "; ".join(
        f"{made[blocks]} of `{blocks}`, and the files hold {len(indices)} more"
        for blocks, indices in sorted(surplus.items())
    )
    return (
        f"the checkpoint {source} is of a larger model than its configuration makes: {listed}. The "
        "rest would be left out. Correct the configuration (such as `num_hidden_layers`), or fetch "
        "the files again."
    )


def _tensors_beyond(
    model: PreTrainedModel, made: Mapping[str, int], names: Iterable[str]
) -> Iterator[tuple[str, str, int]]:
    """Yield the tensors in blocks after the last of `made`: name, list of blocks, index in it."""
    for name in names:
        # The names in a checkpoint of the base model lack the first part.
        for blocks, index in (*_indices(name), *_indices(f"{model.base_model_prefix}.{name}")):
            if blocks in made and index >= made[blocks]:
                yield name, blocks, index


def _blocks_of(model: nn.Module) -> dict[str, int]:
    """Return the number of blocks in each list of a model, by the list's name."""
    counts: dict[str, int] = {}
    for name in model.state_dict():
        for blocks, index in _indices(name):
            counts[blocks] = max(counts.get(blocks, 0), index + 1)
    return counts


def _indices(name: str) -> Iterator[tuple[str, int]]:
    """Yield the lists of blocks that contain a tensor, by its name, with the index in each."""
    for part in re.finditer(r"\.(\d+)(?=\.)", name):
        yield name[: part.start()], int(part[1])


def read_pickle(file: str | os.PathLike[str]) -> Any:
    """Load the tensors and plain containers in a file of `torch.save`, without running its code.

    All tensors are on the CPU, memory-mapped if the file is an archive. `torch.load` raises an
    `UnpicklingError` for other objects.
    """
    # Only an archive can be mapped: its entries are stored, not compressed.
    is_archive = zipfile.is_zipfile(file)
    if is_archive:
        with zipfile.ZipFile(file) as archive:
            if any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist()):
                raise FormatError("it is compressed, and `torch.save` compresses nothing")
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
        # The files are examined only after an error, since that takes time. Errors with a message
        # of their own pass, as does a lack of memory, which is no damage.
        if isinstance(error, OSError | DependencyError | ArgumentError) or is_out_of_memory(error):
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
    """Return why weight files in a directory cannot be read, by name; of safetensors, headers."""
    reasons = {file.name: why_no_pickle(file) for file in directory.glob("pytorch_model*.bin")}
    for file in directory.glob("*.safetensors"):
        try:
            with safe_open(file, framework="pt"):
                pass
        except SafetensorError as error:
            size = file.stat().st_size
            reasons[file.name] = f"its {size:,} bytes are no whole safetensors file ({error})"
    return {name: reason for name, reason in sorted(reasons.items()) if reason is not None}


@contextmanager
def explained_checkpoint(path: Any, *, weights_only: bool = True) -> Iterator[None]:
    """Explain errors of reading a Lightning checkpoint, a path or URL, by a `FormatError`.

    Objects other than tensors and plain containers explain an error only with `weights_only`.
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
