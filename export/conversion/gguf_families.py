"""The layout in GGUF files of the architectures that most models have, and of their tokenizers.

It equals that of llama.cpp's converter for the same checkpoint. Architectures and tokenizers that
are not listed here need a GGUF file of the model; see `gguf_layout`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, RopeScalingType, SpecialVocab, TokenType
from transformers import PreTrainedConfig

from export.conversion.checkpoint import Checkpoint
from export.conversion.gguf_layout import Layout, known_parameters, rotated
from mrp_lightning.errors import OptionError
from mrp_lightning.json_files import read_json

_REMEDY = "Give a GGUF file of the same model with --like."


@dataclass(frozen=True)
class Family:
    """The architecture of some model types.

    Attributes:
        architecture: llama.cpp's name of the architecture.
        rotates: Whether the rows of queries and keys are interleaved in the file.
        adds_one: Whether norms multiply by one plus their weight.
        fields: Adds metadata beyond the common sizes to a writer.
    """

    architecture: str
    rotates: bool = False
    adds_one: bool = False
    fields: Callable[[GGUFWriter, PreTrainedConfig], None] = lambda *_: None


def _soft_caps(writer: GGUFWriter, config: PreTrainedConfig) -> None:
    _window(writer, config)
    writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
    writer.add_final_logit_softcapping(config.final_logit_softcapping)


def _window(writer: GGUFWriter, config: PreTrainedConfig) -> None:
    # llama.cpp divides scores by √head_dim, except for the largest Gemma.
    if config.query_pre_attn_scalar != config.head_dim:
        raise OptionError(
            f"`query_pre_attn_scalar` {config.query_pre_attn_scalar} is not the `head_dim` "
            f"{config.head_dim}, and GGUF metadata have no place for it. {_REMEDY}"
        )
    writer.add_sliding_window(config.sliding_window)


FAMILIES = {
    "llama": Family("llama", rotates=True),
    "mistral": Family("llama", rotates=True),
    "qwen2": Family("qwen2"),
    "qwen3": Family("qwen3"),
    "gemma": Family("gemma", adds_one=True),
    "gemma2": Family("gemma2", adds_one=True, fields=_soft_caps),
    "gemma3_text": Family("gemma3", adds_one=True, fields=_window),
}
"""The known architectures by `model_type`."""


def layout_of_family(checkpoint: Checkpoint) -> Layout:
    """Return the layout of a checkpoint of a known architecture.

    Raises:
        OptionError: The architecture, its positions or the tokenizer are not known here.
    """
    config = checkpoint.pretrained_config()
    family = FAMILIES.get(config.model_type)
    if family is None:
        raise OptionError(
            f"{checkpoint.path}: `model_type` {config.model_type!r} is none of those whose GGUF "
            f"metadata are made here: {', '.join(FAMILIES)}. {_REMEDY}"
        )
    model = checkpoint.load()
    architecture = {name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}[family.architecture]
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    tensors, parameters, known = {}, {}, known_parameters(checkpoint, model)
    for name, parameter in model.state_dict().items():
        # Without a head in the file, llama.cpp uses the embeddings.
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if stored is None:
            raise OptionError(f"llama.cpp's {family.architecture} has no {name}. {_REMEDY}")
        kind = stored.split(".")[-2]
        tensor, of_layer = parameter, known.get(name.removesuffix(".weight"))
        if family.rotates and kind in heads:
            arrange = partial(rotated, heads=heads[kind])
            tensor, of_layer = arrange(parameter), of_layer and of_layer.map(arrange)
        elif family.adds_one and kind.endswith("norm"):
            tensor = parameter.float() + 1
        tensors[stored] = tensor
        if of_layer is not None:
            parameters[stored] = of_layer
    write_tokenizer = _tokenizer(checkpoint, config)
    rope, tables = _positions(config, model)

    def write_fields(writer: GGUFWriter) -> None:
        writer.add_name(checkpoint.path.name)
        writer.add_context_length(config.max_position_embeddings)
        writer.add_embedding_length(config.hidden_size)
        writer.add_block_count(config.num_hidden_layers)
        writer.add_feed_forward_length(config.intermediate_size)
        writer.add_head_count(config.num_attention_heads)
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        writer.add_vocab_size(config.vocab_size)
        width = getattr(config, "head_dim", None)
        width = width or config.hidden_size // config.num_attention_heads
        writer.add_key_length(width)
        writer.add_value_length(width)
        writer.add_rope_dimension_count(width)
        rope(writer)
        family.fields(writer, config)
        write_tokenizer(writer)

    return Layout(family.architecture, tensors, write_fields, tables, parameters)


Tables = dict[str, tuple[np.ndarray[Any, Any], GGMLQuantizationType]]


def _positions(config: PreTrainedConfig, model: Any) -> tuple[Callable[[GGUFWriter], None], Tables]:
    """Return a function that writes the rotary frequencies, and the table that they need."""
    parameters: dict[str, Any] = config.rope_parameters
    if "full_attention" in parameters:  # llama.cpp has the local frequencies of Gemma 3 built in
        local = parameters["sliding_attention"]
        if (local["rope_type"], local["rope_theta"]) != ("default", 10000.0):
            raise OptionError(f"Positions of local attention {local} are not known. {_REMEDY}")
        parameters = parameters["full_attention"]
    kind, base = parameters["rope_type"], parameters["rope_theta"]
    tables: Tables = {}
    if kind == "llama3":
        frequencies = model.get_decoder().rotary_emb.inv_freq.double().numpy()
        exponents = np.arange(len(frequencies)) / len(frequencies)
        factors = (base**-exponents / frequencies).astype(np.float32)
        tables["rope_freqs.weight"] = factors, GGMLQuantizationType.F32
    elif kind not in ("default", "linear"):
        raise OptionError(f"Positions of `rope_type` {kind!r} are not known here. {_REMEDY}")

    def rope(writer: GGUFWriter) -> None:
        writer.add_rope_freq_base(base)
        if kind == "linear":
            writer.add_rope_scaling_type(RopeScalingType.LINEAR)
            writer.add_rope_scaling_factor(parameters["factor"])

    return rope, tables


_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SPLITS = {
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_REST}": "llama-bpe",
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_REST}": "qwen2",
}
"""llama.cpp's names of pre-tokenizers, by their regular expressions."""


def _tokenizer(checkpoint: Checkpoint, config: PreTrainedConfig) -> Callable[[GGUFWriter], None]:
    """Return a function that adds the tokenizer of a checkpoint to a writer.

    Raises:
        OptionError: There is no tokenizer.json, or llama.cpp has no name for its kind.
    """
    file = checkpoint.path / "tokenizer.json"
    if not file.is_file():
        raise OptionError(f"{checkpoint.path} has no tokenizer.json. {_REMEDY}")
    content = read_json(file, "fetch it again")
    model, added = content["model"], content["added_tokens"]
    by_bytes = model.get("byte_fallback", False)
    pre = None if by_bytes else _pre_tokenizer(content["pre_tokenizer"])
    if model["type"] != "BPE" or (pre is None and not by_bytes):
        raise OptionError(f"{file}: llama.cpp's name for this tokenizer is not known. {_REMEDY}")

    size = max(config.vocab_size, 1 + max(model["vocab"].values()))
    tokens, types = [f"[PAD{i}]" for i in range(size)], [TokenType.UNUSED] * size
    for token, number in model["vocab"].items():
        is_byte = by_bytes and len(token) == 6 and token.startswith("<0x")
        tokens[number], types[number] = token, TokenType.BYTE if is_byte else TokenType.NORMAL
    for token in added:
        is_unknown = token["content"] == model.get("unk_token")
        kind = TokenType.CONTROL if token["special"] else TokenType.USER_DEFINED
        tokens[token["id"]] = token["content"]
        types[token["id"]] = TokenType.UNKNOWN if is_unknown else kind
    special = SpecialVocab(checkpoint.path, load_merges=not by_bytes, n_vocab=size)

    def write(writer: GGUFWriter) -> None:
        writer.add_tokenizer_model("llama" if by_bytes else "gpt2")
        writer.add_tokenizer_pre(pre or "default")
        writer.add_token_list(tokens)
        writer.add_token_types(types)
        if by_bytes:
            # The scores of a byte-fallback tokenizer give the order of merges: the earlier a token
            # is merged, the higher its score.
            merged = ["".join(pair).replace(" ", "") for pair in model["merges"]]
            ranks = {token: -rank for rank, token in reversed([*enumerate(merged)])}
            writer.add_token_scores([float(ranks.get(token, -len(merged))) for token in tokens])
            writer.add_add_space_prefix(_prepends_space(content))
        special.add_to_gguf(writer, quiet=True)

    return write


def _pre_tokenizer(content: dict[str, Any] | None) -> str | None:
    """Return llama.cpp's name of the pre-tokenizer; None if it is unknown."""
    steps = (content or {}).get("pretokenizers") or [content or {"type": None}]
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return "gpt-2"
    if kinds == ["Digits", "ByteLevel"] and steps[0]["individual_digits"]:
        return "smollm"
    if kinds == ["Split", "ByteLevel"] and not steps[1]["use_regex"]:
        return _SPLITS.get(steps[0]["pattern"].get("Regex", ""))
    return None


def _prepends_space(content: dict[str, Any]) -> bool:
    """Return whether a text is tokenized with a space at its start."""
    steps = (content.get("normalizer") or {}).get("normalizers") or [content.get("normalizer")]
    metaspace = content.get("pre_tokenizer") or {}
    return any(step and step["type"] == "Prepend" for step in steps) or (
        metaspace.get("type") == "Metaspace" and metaspace.get("prepend_scheme") != "never"
    )
