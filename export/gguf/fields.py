"""The fields of a transformers configuration that a GGUF file can hold, and their values.

llama.cpp computes an architecture as its own code says: metadata change some numbers of it, and the
rest, such as the activation, is fixed. A checkpoint whose configuration says otherwise would run,
and compute another function. So every field of a family's configuration class is known here, and
has a value that the file holds, or the checkpoint is refused by the name of the field.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, RopeScalingType
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig

from mrp_lightning.errors import OptionError

Rule = Callable[[PreTrainedConfig], str | None]
"""Returns why llama.cpp cannot compute with a field of a configuration, `None` if it can."""

WITHOUT_EFFECT = frozenset(
    {
        # training and bookkeeping
        *("initializer_range", "attention_dropout", "transformers_version", "problem_type"),
        *("id2label", "label2id", "dtype"),
        # the form of the outputs, and caches
        *("output_hidden_states", "return_dict", "use_cache"),
        # how products are split, which changes no result
        *("chunk_size_feed_forward", "pretraining_tp"),
        # the tokenizer's metadata name these tokens
        *("pad_token_id", "bos_token_id", "eos_token_id"),
        # tensors decide: a head that differs from the embeddings is stored
        "tie_word_embeddings",
    }
)
"""Fields of configurations that do not change the next token's probabilities."""

SIZES = frozenset(
    {
        *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
        *("num_attention_heads", "num_key_value_heads", "head_dim"),
        *("max_position_embeddings", "rms_norm_eps"),
    }
)
"""Fields that every family writes as metadata."""

SILU = ("silu", "swish")
GELU = ("gelu_pytorch_tanh", "gelu_new")  # llama.cpp's GELU is the approximation by tanh
NO = (None, False)


@dataclass(frozen=True)
class Fields:
    """The fields of a configuration class beyond `SIZES` and `WITHOUT_EFFECT`.

    Attributes:
        stored: Fields of which a file holds any value, as metadata or tensors, and those that only
            give defaults of others.
        fixed: The values with which llama.cpp computes, by field.
        judged: A rule for each field whose values depend on others.
        warned: A rule for each field whose values matter for some texts only.
    """

    stored: frozenset[str] = frozenset()
    fixed: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    judged: Mapping[str, Rule] = field(default_factory=dict)
    warned: Mapping[str, Rule] = field(default_factory=dict)

    @property
    def known(self) -> frozenset[str]:
        """The names of all fields of a configuration that this family knows."""
        own = self.stored | self.fixed.keys() | self.judged.keys() | self.warned.keys()
        return SIZES | WITHOUT_EFFECT | _OF_ALL | own

    def warnings(self, config: PreTrainedConfig) -> list[str]:
        """Return the differences between llama.cpp and transformers on some texts."""
        reasons = (rule(config) for rule in self.warned.values())
        return [reason for reason in reasons if reason is not None]

    def problems(self, config: PreTrainedConfig, unless: Collection[str] = ()) -> Iterator[str]:
        """Yield the problem of each field whose value a GGUF file of the family cannot express.

        Where the format has no field, llama.cpp computes with a constant, and only that value is
        right. The fields in `unless` are not judged.
        """
        for each in fields(config):
            # A field that a later version of transformers adds is refused too, until its effect is
            # known.
            if each.name not in self.known:
                yield f"`{each.name}` {getattr(config, each.name)!r} is not known here"
        for name, values in self.fixed.items():
            value = getattr(config, name, None)
            if value not in values:
                expected = " or ".join(map(repr, values))
                yield f"`{name}` is {value!r}, and llama.cpp computes with {expected}"
        yield from own_code(config)
        # Warned fields are not judged: they change texts of some length only, and the file stays
        # right for all others.
        for name, rule in self.judged.items():
            if name not in unless and (reason := rule(config)):
                yield reason

    def require(self, config: PreTrainedConfig, source: Any, unless: Collection[str] = ()) -> None:
        """Raise an OptionError that lists all fields that the file cannot hold.

        Args:
            config: A configuration of the family.
            source: The location of the checkpoint, for the message.
            unless: Fields that are not judged.
        """
        if problems := list(self.problems(config, unless)):
            listed = "\n".join(f"  {problem}" for problem in problems)
            raise OptionError(
                f"{source}: llama.cpp would compute another function than this model "
                f"(`model_type` {config.model_type!r}), in {len(problems)} of the fields of its "
                "configuration. Serve it with transformers or vLLM, or correct config.json where "
                f"it does not describe the model:\n{listed}"
            )


def own_code(config: PreTrainedConfig) -> Iterator[str]:
    """Yield why the model is none of transformers' class for its `model_type`."""
    expected: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    names = config.architectures or []
    # The case of letters is ignored, and a checkpoint that names no class has the one of its
    # `model_type`.
    if names and expected and [name.lower() for name in names] != [expected.__name__.lower()]:
        yield f"`architectures` names {', '.join(names)}, and the file is of a {expected.__name__}"
    # Code of a tokenizer is no code of the model, and its tokenizer.json is what the file holds.
    kinds = ("AutoConfig", "AutoModel")
    of_model = [x for x in getattr(config, "auto_map", None) or {} if x.startswith(kinds)]
    if of_model:
        yield f"`auto_map` gives code of the checkpoint for {', '.join(of_model)}"
    if getattr(config, "is_heterogeneous", False):
        yield "`per_layer_config` gives some blocks other values"
    if config.is_encoder_decoder:
        yield "`is_encoder_decoder` is true"


_OF_ALL = frozenset({"architectures", "auto_map", "per_layer_config", "is_encoder_decoder"})
"""Fields of every configuration that `own_code` judges."""


def head_dim_divides(config: PreTrainedConfig) -> str | None:
    """Return why heads have another width than llama.cpp derives from the model's, or `None`."""
    width = config.hidden_size // config.num_attention_heads
    value = getattr(config, "head_dim", None) or width
    if value == width:
        return None
    return f"`head_dim` is {value}, and llama.cpp computes with hidden_size / heads, {width}"


def layers_alternate(period: int) -> Rule:
    """Return a rule: of `period` layers, the last attends to all tokens, the others to a window."""

    def rule(config: PreTrainedConfig) -> str | None:
        expected = [
            "full_attention" if (index + 1) % period == 0 else "sliding_attention"
            for index in range(config.num_hidden_layers)
        ]
        if list(config.layer_types) == expected:
            return None
        kinds = list(config.layer_types)
        counts = ", ".join(f"{kinds.count(kind)} × {kind}" for kind in dict.fromkeys(kinds))
        return (
            f"`layer_types` are {counts}, and llama.cpp takes one layer in "
            f"{period} as full attention, the last of them, and the others as sliding"
        )

    return rule


def all_attend(config: PreTrainedConfig) -> str | None:
    """Return why layers have neither full nor sliding attention (`unheld_window`), or `None`."""
    kinds = set(getattr(config, "layer_types", None) or ())
    if other := sorted(kinds - {"full_attention", "sliding_attention"}):
        return f"`layer_types` names {', '.join(other)}, and llama.cpp attends to all tokens"
    return None


def has_number(name: str) -> Rule:
    """Return a rule: a field must not be null, since llama.cpp then takes a number of its own."""

    def rule(config: PreTrainedConfig) -> str | None:
        value = getattr(config, name, None)
        return None if value is not None else f"`{name}` is null, and llama.cpp needs a number"

    return rule


def scale_of_queries(blocks_of_largest: int) -> Rule:
    """Return a rule for Gemma's `query_pre_attn_scalar`, which the metadata of GGUF lack.

    llama.cpp divides scores by √head_dim, but in models with as many blocks as the largest by
    √(hidden_size / heads).
    """

    def rule(config: PreTrainedConfig) -> str | None:
        expected = config.head_dim
        # llama.cpp recognises the largest model by its number of blocks, so this rule has to do so,
        # too.
        if config.num_hidden_layers == blocks_of_largest:
            expected = config.hidden_size // config.num_attention_heads
        if config.query_pre_attn_scalar == expected:
            return None
        return (
            f"`query_pre_attn_scalar` is {config.query_pre_attn_scalar}, and llama.cpp computes "
            f"with {expected} in a model of this size"
        )

    return rule


def unheld_window(config: PreTrainedConfig) -> str | None:
    """Return a warning of a window that llama.cpp lacks and a text may exceed, or `None`."""
    window = getattr(config, "sliding_window", None)
    if window is None or window >= config.max_position_embeddings:
        return None
    if "sliding_attention" not in (getattr(config, "layer_types", None) or ["sliding_attention"]):
        return None
    return (
        f"`sliding_window` is {window}, and llama.cpp attends to all tokens: texts of more than "
        f"{window} tokens get other logits than from transformers. Run it with `-c {window}`, or "
        "where windows are read."
    )


Tables = dict[str, tuple[np.ndarray[Any, Any], GGMLQuantizationType]]

PLAIN = ("default", "linear")
_SETTINGS = {
    "default": set(),
    "linear": {"factor"},
    "llama3": {
        *("factor", "low_freq_factor", "high_freq_factor"),
        "original_max_position_embeddings",
    },
}
"""The settings that each kind of positions reads."""
_LOCAL_BASE = 10000.0
"""The base of local attention that llama.cpp has built in for Gemma 3."""


def positions_of(*kinds: str) -> Rule:
    """Return a rule: positions are of one of these kinds, with no settings but its own."""

    def rule(config: PreTrainedConfig) -> str | None:
        return _problem(config.rope_parameters or {}, kinds)

    return rule


def local_and_global(config: PreTrainedConfig) -> str | None:
    """Return why llama.cpp cannot compute Gemma 3's two kinds of positions, `None` if it can."""
    local = config.rope_parameters["sliding_attention"]
    if (local["rope_type"], local["rope_theta"]) != ("default", _LOCAL_BASE):
        return (
            f"`rope_parameters` of local attention are {local}, and llama.cpp computes with "
            f"`rope_type` default and `rope_theta` {_LOCAL_BASE:g}"
        )
    return _problem(config.rope_parameters["full_attention"], PLAIN)


def _problem(parameters: Mapping[str, Any], kinds: Collection[str]) -> str | None:
    kind: Any = parameters.get("rope_type")
    if kind not in kinds:
        return (
            f"`rope_type` {kind!r} is not known here, but {', '.join(kinds)} are; the positions of "
            "a GGUF file of the same model are taken with --like"
        )
    # A setting that the kind does not read in llama.cpp would be lost without a message, so that
    # unknown ones refuse the checkpoint. A partial factor of 1 rotates everything, as without it.
    known = {"rope_type", "type", "rope_theta", *_SETTINGS[kind]}
    other = {
        name: value
        for name, value in parameters.items()
        if name not in known and value is not None and (name, value) != ("partial_rotary_factor", 1)
    }
    if not other:
        return None
    return f"`rope_parameters` have {other}, which no metadata of `rope_type` {kind!r} hold"


def positions(config: PreTrainedConfig, model: Any) -> tuple[Callable[[GGUFWriter], None], Tables]:
    """Return a function that writes base and scaling, and llama3's table of factors, if any."""
    parameters: dict[str, Any] = config.rope_parameters
    # Gemma 3 has two sets of positions. The local one is built into llama.cpp and checked by
    # `local_and_global`, so that the file holds the global one.
    parameters = parameters.get("full_attention", parameters)
    kind, base = parameters["rope_type"], parameters["rope_theta"]
    tables: Tables = {}
    if kind == "llama3":
        frequencies = model.get_decoder().rotary_emb.inv_freq.double().numpy()
        exponents = np.arange(len(frequencies)) / len(frequencies)
        # llama.cpp divides its own frequencies base^(−2i/d) by the table, and i / len(frequencies)
        # is 2i/d. The quotient in float64 leaves one rounding, that of the table to float32.
        factors = (base**-exponents / frequencies).astype(np.float32)
        tables["rope_freqs.weight"] = factors, GGMLQuantizationType.F32

    def write(writer: GGUFWriter) -> None:
        writer.add_rope_freq_base(base)
        if kind == "linear":
            writer.add_rope_scaling_type(RopeScalingType.LINEAR)
            writer.add_rope_scaling_factor(parameters["factor"])

    return write, tables
