"""The layout in GGUF files of the architectures that most models have.

It equals that of llama.cpp's converter for the same checkpoint. Architectures that are not listed
here need a GGUF file of the model; see `like`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import gguf
from gguf import GGUFWriter
from torch import Tensor
from transformers import PreTrainedConfig

from export.conversion.checkpoint import Checkpoint
from export.gguf.fields import (
    GELU,
    NO,
    PLAIN,
    SILU,
    Fields,
    Tables,
    all_attend,
    has_number,
    head_dim_divides,
    layers_alternate,
    local_and_global,
    positions,
    positions_of,
    scale_of_queries,
    unheld_window,
)
from export.gguf.layout import (
    Layout,
    Location,
    arranged_parameters,
    arranged_tensors,
    known_parameters,
    one_more,
    rotated,
    separate_head,
    table_shared,
)
from export.gguf.tokenizer import tokenizer_fields
from mrp_lightning.errors import OptionError

_REMEDY = "Give a GGUF file of the same model with --like."


@dataclass(frozen=True)
class Family:
    """The architecture of some model types.

    Attributes:
        architecture: llama.cpp's name of the architecture.
        fields: The entries of the configuration that the file can express.
        rotates: Whether the rows of queries and keys are interleaved in the file.
        adds_one: Whether norms multiply by one plus their weight.
        has_head: Whether llama.cpp reads a head that differs from the embeddings.
        write: Adds metadata beyond the common sizes to a writer.
    """

    architecture: str
    fields: Fields
    rotates: bool = False
    adds_one: bool = False
    has_head: bool = True
    write: Callable[[GGUFWriter, PreTrainedConfig], None] = lambda *_: None

    def require_head(self, name: str, source: Any) -> None:
        """Raise an OptionError if llama.cpp reads no head that differs from the embeddings."""
        if not self.has_head:
            raise OptionError(
                f"{source}: its {name} differs from the embeddings, and llama.cpp's "
                f"{self.architecture} computes the logits with the embeddings. Serve it with "
                "transformers or vLLM."
            )


def _write_window(writer: GGUFWriter, config: PreTrainedConfig) -> None:
    writer.add_sliding_window(config.sliding_window)


def _write_soft_caps(writer: GGUFWriter, config: PreTrainedConfig) -> None:
    _write_window(writer, config)
    writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
    writer.add_final_logit_softcapping(config.final_logit_softcapping)


_LLAMA = Family(
    "llama",
    Fields(
        stored=frozenset({"attention_bias", "mlp_bias"}),
        fixed={"hidden_act": SILU},
        judged={"rope_parameters": positions_of(*PLAIN, "llama3")},
    ),
    rotates=True,
)
_MISTRAL = replace(_LLAMA, fields=replace(_LLAMA.fields, warned={"sliding_window": unheld_window}))
_QWEN2 = Family(
    "qwen2",
    Fields(
        stored=frozenset({"use_sliding_window", "max_window_layers"}),
        fixed={"hidden_act": SILU},
        judged={
            "rope_parameters": positions_of(*PLAIN),
            "layer_types": all_attend,
            "head_dim": head_dim_divides,
        },
        warned={"sliding_window": unheld_window},
    ),
)
_QWEN3 = Family(
    "qwen3",
    replace(
        _QWEN2.fields,
        fixed={"hidden_act": SILU, "attention_bias": NO},
        judged={"rope_parameters": positions_of(*PLAIN), "layer_types": all_attend},
    ),
)
_GEMMA = Family(
    "gemma",
    Fields(
        fixed={"hidden_act": GELU, "attention_bias": NO, "use_bidirectional_attention": NO},
        judged={"rope_parameters": positions_of(*PLAIN)},
    ),
    adds_one=True,
    has_head=False,
)
_WITHOUT_BIAS = {
    "hidden_activation": GELU,
    "attention_bias": NO,
    "use_bidirectional_attention": NO,
}
_GEMMA2 = replace(
    _GEMMA,
    architecture="gemma2",
    fields=Fields(
        fixed=_WITHOUT_BIAS,
        judged={
            "rope_parameters": positions_of(*PLAIN),
            "layer_types": layers_alternate(2),
            "query_pre_attn_scalar": scale_of_queries(46),
            "sliding_window": has_number("sliding_window"),
            "attn_logit_softcapping": has_number("attn_logit_softcapping"),
            "final_logit_softcapping": has_number("final_logit_softcapping"),
        },
    ),
    write=_write_soft_caps,
)
_GEMMA3 = replace(
    _GEMMA,
    architecture="gemma3",
    fields=Fields(
        fixed=_WITHOUT_BIAS
        | {"attn_logit_softcapping": (None,), "final_logit_softcapping": (None,)},
        judged={
            "rope_parameters": local_and_global,
            "layer_types": layers_alternate(6),
            "query_pre_attn_scalar": scale_of_queries(62),
            "sliding_window": has_number("sliding_window"),
        },
    ),
    has_head=True,
    write=_write_window,
)

FAMILIES = {
    "llama": _LLAMA,
    "mistral": _MISTRAL,
    "qwen2": _QWEN2,
    "qwen3": _QWEN3,
    "gemma": _GEMMA,
    "gemma2": _GEMMA2,
    "gemma3_text": _GEMMA3,
}
"""The known architectures by `model_type`."""


def family_of(config: PreTrainedConfig, source: Any) -> Family:
    """Return the architecture of a configuration that a GGUF file can hold.

    Args:
        config: The configuration of a causal language model.
        source: The location of the checkpoint, for messages.

    Raises:
        OptionError: The architecture is not known here, or fields have values that the file cannot
            hold; all of these are listed.
    """
    family = FAMILIES.get(config.model_type)
    if family is None:
        raise OptionError(
            f"{source}: `model_type` {config.model_type!r} is none of those whose GGUF "
            f"metadata are made here: {', '.join(FAMILIES)}. {_REMEDY}"
        )
    family.fields.require(config, source)
    return family


def layout_of_family(checkpoint: Checkpoint) -> Layout:
    """Return the layout of a checkpoint of a known architecture.

    Raises:
        OptionError: The architecture or the tokenizer is not known here, or fields of the
            configuration have values that the file cannot hold.
        FormatError: The files hold tensors that the model lacks.
    """
    config = checkpoint.pretrained_config()
    # Fields and tokenizer are checked before the weights are read, which takes far longer.
    family = family_of(config, checkpoint.path)
    write_tokenizer, notes = tokenizer_fields(checkpoint, config)
    model = checkpoint.load()
    # The files' values are taken, and not the loaded model's, which are rounded to `dtype`: whether
    # a type holds a weight exactly depends on its bits.
    state = checkpoint.state(model)
    locations = _locations(family, config, state)
    # A head that equals the embeddings is not stored twice, but keeps a location, so that the proof
    # compares it with the table that llama.cpp uses in its stead.
    if (head := separate_head(model, state)) is None:
        locations |= table_shared(model, locations)
    else:
        family.require_head(head, checkpoint.path)
    write_metadata, tables = metadata(family, config, model)

    def write_fields(writer: GGUFWriter) -> None:
        writer.add_name(checkpoint.path.name)
        write_metadata(writer)
        write_tokenizer(writer)

    return Layout(
        family.architecture,
        locations,
        arranged_tensors(state, locations),
        write_fields,
        tables,
        arranged_parameters(known_parameters(checkpoint, model), locations),
        [*family.fields.warnings(config), *notes],
    )


def metadata(
    family: Family, config: PreTrainedConfig, model: Any
) -> tuple[Callable[[GGUFWriter], None], Tables]:
    """Return a function that writes the architecture's metadata, and the tables of its positions.

    The tables are tensors of the file, by name, such as the factors of scaled rotary positions.
    """
    write_positions, tables = positions(config, model)

    def write(writer: GGUFWriter) -> None:
        writer.add_context_length(config.max_position_embeddings)
        writer.add_embedding_length(config.hidden_size)
        writer.add_block_count(config.num_hidden_layers)
        writer.add_feed_forward_length(config.intermediate_size)
        writer.add_head_count(config.num_attention_heads)
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        writer.add_vocab_size(config.vocab_size)
        # The width is always written, since llama.cpp's default, embedding_length / head_count, is
        # wrong for models whose heads are wider or narrower than that.
        width = getattr(config, "head_dim", None)
        width = width or config.hidden_size // config.num_attention_heads
        writer.add_key_length(width)
        writer.add_value_length(width)
        writer.add_rope_dimension_count(width)
        write_positions(writer)
        family.write(writer, config)

    return write, tables


def _locations(
    family: Family, config: PreTrainedConfig, state: Mapping[str, Tensor]
) -> dict[str, Location]:
    """Return where the file of a family holds each parameter."""
    architecture = {name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}[family.architecture]
    # The names come from llama.cpp's own package, so a parameter without one is a parameter that
    # llama.cpp would not read: the model would run without it, and compute another function.
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    locations, missing = {}, []
    for name in state:
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if stored is None and not name.startswith("lm_head"):
            missing.append(name)
            continue
        stored = stored or "output.weight"
        kind = stored.split(".")[-2]
        # Scales belong to rows, and rows are interleaved, so the grid parameters take the same
        # order. Norms have no codes, and need no order of rows.
        if family.rotates and kind in heads:
            arrange = partial(rotated, heads=heads[kind])
            locations[name] = Location(stored, arrange, arrange)
        elif family.adds_one and kind.endswith("norm"):
            locations[name] = Location(stored, one_more)
        else:
            locations[name] = Location(stored)
    if missing:
        raise OptionError(
            f"llama.cpp's {family.architecture} has no {', '.join(missing[:5])}"
            f"{' and more' if len(missing) > 5 else ''}. {_REMEDY}"
        )
    return locations
