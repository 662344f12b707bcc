"""In which precision each weight of a model is stored."""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from copy import deepcopy
from typing import Any

import torch
from huggingface_hub.errors import HFValidationError
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import build_glob_alternation

from mrp_lightning.errors import FormatError
from mrp_lightning.models.checkpoint import directory_of, names_in_model, weight_files
from mrp_lightning.models.loading import as_dtype
from mrp_lightning.upstream.transformers_names import conversions_at_loading, dtypes_kept

_WIDE = {"F32": torch.float32, "F64": torch.float64}


def stored_dtype(model: PreTrainedModel) -> torch.dtype:
    """The precision in which a model was published, and in which it is stored."""
    return as_dtype(model.config.dtype) or model.dtype


def wider_dtypes(
    model: PreTrainedModel, dtype: torch.dtype, *, as_published: bool
) -> dict[str, torch.dtype]:
    """The dtypes of weights that are stored in more than `dtype`, by their names in the model.

    These are the weights that transformers keeps in float32 in a model that it loads in `dtype`
    and, `as_published`, those that are wider in the files from which the model was loaded, as far
    as these are safetensors and still there.
    """
    found: dict[str, torch.dtype] = {}
    if kept := dtypes_kept(model, dtype):
        pattern, groups, _ = build_glob_alternation(list(kept))
        for name in model.state_dict():
            if (match := pattern.search(name)) and match.lastgroup:
                found[name] = kept[groups[match.lastgroup]]
    if as_published:
        found |= {n: d for n, d in _published_wide(model) if d.itemsize > dtype.itemsize}
    return found


def cast(
    state: dict[str, Tensor], dtype: torch.dtype, wider: Mapping[str, torch.dtype]
) -> dict[str, Tensor]:
    """Floating tensors in `dtype` or, by name, in a wider one.

    Tensors that shared memory still share it, so ties survive.
    """
    places: dict[str, Any] = {
        name: (x.data_ptr(), x.shape, x.stride(), x.dtype) for name, x in state.items()
    }
    dtypes = {places[name]: wider[name] for name in state if name in wider}
    cast: dict[Any, Tensor] = {}
    result = {}
    for name, tensor in state.items():
        place = places[name]
        if place not in cast or not tensor.numel():
            wanted = dtypes.get(place, dtype) if tensor.is_floating_point() else tensor.dtype
            cast[place] = tensor.to(wanted)
        result[name] = cast[place]
    return result


def _published_wide(model: PreTrainedModel) -> Iterator[tuple[str, torch.dtype]]:
    """The names in the model of tensors that its source holds in 32 bits or more."""
    # It may be gone by now, something else, or no source: a name of nothing on the hub.
    with suppress(FormatError, OSError, SafetensorError, HFValidationError):
        stored = {name: _WIDE[kind] for name, kind in _headers(model) if kind in _WIDE}
        # They keep a state, so that each use takes a copy.
        name_in_model = names_in_model(model, deepcopy(conversions_at_loading(model)))
        yield from ((name_in_model(name)[0], dtype) for name, dtype in stored.items())


def _headers(model: PreTrainedModel) -> Iterator[tuple[str, str]]:
    """The names and dtypes of the tensors of the safetensors files that a model was loaded from."""
    directory = directory_of(model.name_or_path or "")
    for file in weight_files(directory) if directory else ():
        if file.suffix == ".safetensors":
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118 (no mapping)
                    yield name, opened.get_slice(name).get_dtype()
