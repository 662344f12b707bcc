"""Rotary positions of a checkpoint as metadata and tables of a GGUF file."""

from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, RopeScalingType
from transformers import PreTrainedConfig

from export.gguf.fields import Rule

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
