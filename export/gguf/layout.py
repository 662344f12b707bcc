"""The layout of a checkpoint in a GGUF file: architecture, metadata, tokenizer, tensors.

`families` describes the layout of known architectures, and `like` takes that of another GGUF file
of the same model. Both give the location of each parameter, so that `proof` can compare the written
file with the checkpoint, tensor by tensor.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from torch import Tensor, nn
from transformers import PreTrainedModel

from export.conversion.checkpoint import Checkpoint
from mrp_lightning.solver.grid import GridParameters

Arrange = Callable[[Tensor], Tensor]


def unchanged(tensor: Tensor) -> Tensor:
    """Return a tensor that a file holds as transformers does."""
    return tensor


def one_more(tensor: Tensor) -> Tensor:
    """Return the factors of a norm that multiplies by one plus its weight, as Gemma's do."""
    return tensor.float() + 1


def rotated(tensor: Tensor, heads: int) -> Tensor:
    """Interleave the halves of each head, since llama.cpp rotates adjacent rows."""
    # A tensor without two halves for each head is no query or key of these heads. It stays as it
    # is, and the comparison with the file's values decides whether that is right.
    if len(tensor) % (2 * heads):
        return tensor
    # transformers rotates row i with row i + d/2 of a head of d rows, llama.cpp 2i with 2i + 1: row
    # i of the first half goes to 2i, and row i of the second to 2i + 1.
    return tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)


@dataclass(frozen=True)
class Location:
    """The tensor of a GGUF file that holds a parameter, and its arrangement there.

    Attributes:
        stored: The name of the tensor.
        arrange: Returns the tensor, given the parameter.
        arrange_rows: Returns a tensor (rows, ...) of a layer, such as its scales, in the order of
            the rows of the tensor. A weight that is stored transposed keeps their order.
    """

    stored: str
    arrange: Arrange = unchanged
    arrange_rows: Arrange = unchanged


@dataclass(frozen=True)
class Layout:
    """The content of a GGUF file for a checkpoint.

    Attributes:
        architecture: llama.cpp's name of the architecture.
        locations: The location of each parameter, by its name in transformers' model. Tied
            parameters share one.
        tensors: The weights as arranged in the file, by their names in the file.
        write_fields: Adds the metadata and the tokenizer to a writer.
        tables: Tensors that are no weights, such as frequencies, and their types.
        parameters: The grid parameters of weights, arranged like these, by their names in the file.
        notes: Differences between llama.cpp and transformers on some texts.
    """

    architecture: str
    locations: Mapping[str, Location]
    tensors: Mapping[str, Tensor]
    write_fields: Callable[[GGUFWriter], None]
    tables: Mapping[str, tuple[np.ndarray[Any, Any], GGMLQuantizationType]] = field(
        default_factory=dict
    )
    parameters: Mapping[str, GridParameters] = field(default_factory=dict)
    notes: Sequence[str] = ()


def arranged_tensors(
    state: Mapping[str, Tensor], locations: Mapping[str, Location]
) -> dict[str, Tensor]:
    """Return the tensors of a file by their names there, given the parameters of a model."""
    return {each.stored: each.arrange(state[name]) for name, each in locations.items()}


def known_parameters(checkpoint: Checkpoint, model: nn.Module) -> dict[str, GridParameters]:
    """Return the grid parameters of a checkpoint by the names of modules; tied ones share them."""
    known = checkpoint.grid_parameters()
    weights = dict(model.named_parameters(remove_duplicate=False))
    # The identity of the parameter, not its name, joins a tied head with its table: pruning
    # recorded the parameters under one of the names only.
    by_weight = {
        id(weight): known[name]
        for name in known
        if (weight := weights.get(f"{name}.weight")) is not None
    }
    return {
        name.removesuffix(".weight"): by_weight[id(weight)]
        for name, weight in weights.items()
        if id(weight) in by_weight
    }


def arranged_parameters(
    known: Mapping[str, GridParameters], locations: Mapping[str, Location]
) -> dict[str, GridParameters]:
    """Return grid parameters by the names of tensors in a file, given those by names of modules."""
    return {
        location.stored: of_layer.map(location.arrange_rows)
        for name, location in locations.items()
        if (of_layer := known.get(name.removesuffix(".weight"))) is not None
    }


def separate_head(model: PreTrainedModel, state: Mapping[str, Tensor]) -> str | None:
    """Return the name of a head whose values are not those of the embeddings, else `None`.

    The values decide, and no flag of a configuration: without a head in a file, llama.cpp computes
    the logits with the embeddings.
    """
    head, table = _vocabulary(model)
    # An empty name is in no state, so a model without a head needs no case of its own.
    if head not in state or (table in state and torch.equal(state[head], state[table])):
        return None
    return head


def table_shared(model: PreTrainedModel, locations: Mapping[str, Location]) -> dict[str, Location]:
    """Return the location of a head that equals the embeddings, by the head's name.

    The file has the values once, so that it is that of the embeddings. Empty without a head.
    """
    head, table = _vocabulary(model)
    return {head: locations[table]} if head and table in locations else {}


def _vocabulary(model: PreTrainedModel) -> tuple[str, str]:
    """Return the names of the weights of head and embeddings; empty for those that do not exist."""
    names = {id(module): f"{name}.weight" for name, module in model.named_modules()}
    ends: tuple[Any, Any] = model.get_output_embeddings(), model.get_input_embeddings()
    return names.get(id(ends[0]), ""), names.get(id(ends[1]), "")
