"""Private names of transformers."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

EXPERTS = "_experts_implementation"
"""The attribute of a configuration that selects the kernel of stacked experts. Seen in transformers
5.23. Its public setter, `PreTrainedModel.set_experts_implementation`, needs the model, but
calibration may only have a module that holds experts. Replacement: a public attribute."""


def dtypes_kept(model: Any, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """Return the dtypes that weights keep in a model loaded in `dtype`, by patterns of names.

    Seen in transformers 5.23. Saved weights must have the dtypes that loading gives them. There is
    no public name.
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
    stacked experts to the disk once more.

    Args:
        load_weights: Called with the built model, its state, the names of its files and the loading
            options; returns the loading report and `None`.
    """
    from transformers import PreTrainedModel

    name = "_load_pretrained_model"
    original = PreTrainedModel.__dict__[name]
    setattr(PreTrainedModel, name, staticmethod(load_weights))
    try:
        yield
    finally:
        setattr(PreTrainedModel, name, original)
