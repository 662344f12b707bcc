"""Names that transformers keeps to itself."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

EXPERTS = "_experts_implementation"
"""The attribute of a configuration that says how stacked experts are multiplied. Seen in
transformers 5.23.

Its public setter, `PreTrainedModel.set_experts_implementation`, needs the model; calibration has
any module that holds experts. In its place: an attribute of that name without the underscore."""


def takes_any_cache(model: Any) -> bool:
    """Whether a model generates with a cache that it is given, by whichever layers this has.

    Those that transformers lets generate with one of a fixed size do. Seen in transformers 5.23,
    where others fail in the middle of a forward. In its place: a public property of models.
    """
    return bool(model._can_compile_fullgraph)


def dtypes_kept(model: Any, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """The dtypes that transformers keeps in a model that it loads in `dtype`, by patterns of names.

    Seen in transformers 5.23. What is saved has to be what a loading would give. Nothing public
    tells it.
    """
    return model._get_dtype_plan(dtype)


def conversions_at_loading(model: Any) -> list[Any]:
    """The steps by which transformers made a model's weights of the tensors in its files.

    Seen in transformers 5.23, whose `save_pretrained` reverts them. They say which tensor of a file
    became which of the model. In its place: `transformers.core_model_loading`, once it has a
    function of the model alone.
    """
    return getattr(model, "_weight_conversions", None) or []


def from_config(kind: Any, config: Any) -> Any:
    """A model of one class by its configuration, in the configuration's dtype.

    Seen in transformers 5.23, where only the auto classes have a public `from_config`, and these
    know one class a configuration. In its place: a public one of `PreTrainedModel`.
    """
    return kind._from_config(config)


@contextmanager
def loading_weights_by(load_weights: Callable[..., Any]) -> Iterator[None]:
    """Let `from_pretrained` do all but load the weights.

    It finds the files, builds the model on the meta device, makes what no file holds (such as
    rotary tables), ties and reports. Seen in transformers 5.23. In its place: an argument that
    leaves weights where they are. The only one is accelerate's `device_map`, which writes stacked
    experts to the disk once more.

    Args:
        load_weights: Takes a model that is built, its state, the names of its files and how they
            are to be loaded, and gives what was found in them, and a second value, which is `None`.
    """
    from transformers import PreTrainedModel

    name = "_load_pretrained_model"
    own = PreTrainedModel.__dict__[name]
    setattr(PreTrainedModel, name, staticmethod(load_weights))
    try:
        yield
    finally:
        setattr(PreTrainedModel, name, own)
