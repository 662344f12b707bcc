"""Check that the configuration, the files and the model of a checkpoint are of one another."""

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from mrp_lightning.errors import FormatError
from mrp_lightning.models.checkpoint import weight_files

_MOST_MODULES = 4096
"""The largest plausible number of layers or blocks of one kind; published models have some
hundreds."""
_MOST_EXPERTS = 2**15
"""The largest number of experts, of which the product keys of Doge have 16,384."""
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
    names = sorted(names)
    # `larger` refuses more blocks than the family has.
    further = {name for name, *_ in _beyond(model, _blocks_of(model), names)}
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


def larger(
    source: str | os.PathLike[str], model: PreTrainedModel, names: Iterable[str]
) -> str | None:
    """Return how a checkpoint's model is larger than its configuration says, `None` if it is not.

    `names` are the names of the checkpoint's tensors: all, or those that the model lacks.
    """
    made, surplus = _blocks_of(model), dict[str, set[int]]()
    # Some families have blocks for multi-token prediction after the last one.
    further = getattr(model.config, "num_nextn_predict_layers", None) or 0
    for _, blocks, index in _beyond(model, made, names):
        if index >= made[blocks] + further:
            surplus.setdefault(blocks, set()).add(index)
    if not surplus:
        return None
    listed = [
        f"{made[blocks]} of `{blocks}`, and the files hold {len(indices)} more"
        for blocks, indices in sorted(surplus.items())
    ]
    return (
        f"the checkpoint {source} is of a larger model than its configuration makes: "
        f"{'; '.join(listed)}. The rest would be left out. Correct the configuration (such as "
        "`num_hidden_layers`), or fetch the files again."
    )


def _beyond(
    model: PreTrainedModel, made: Mapping[str, int], names: Iterable[str]
) -> Iterator[tuple[str, str, int]]:
    """Yield the tensors in blocks after a model's last: name, list of blocks, index in it.

    `made` is the number of blocks in each of the model's lists; tensors in other lists are none.
    """
    for name in names:
        # The names in a checkpoint of the base model lack the first part.
        for blocks, index in (*_places(name), *_places(f"{model.base_model_prefix}.{name}")):
            if blocks in made and index >= made[blocks]:
                yield name, blocks, index


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
