"""Cut a model's vocabulary to the tokens that a text needs: fewer rows of its embeddings and head.

As for units and blocks, the model is built twice without weights, by its configuration and by one
of fewer tokens, so that no model family needs code of its own. `tokenizer` has what concerns the
tokenizer.
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from mrp_lightning.errors import DataError, OptionError, counted
from mrp_lightning.narrowing.structure import Attribute, set_attributes
from mrp_lightning.narrowing.tokenizer import (
    Vocabulary,
    cannot_cut,
    prove_tokens,
    renumbered_tokenizer,
)
from mrp_lightning.narrowing.unit_parts import UnfitError, built, different_attributes, shapes_of

_COMPARED = 128
"""The most tokens on which the logits of both models are compared."""
_ROUNDING = 4
"""The distance of equal logits that counts as rounding, in units of the precision and norm."""
_SEQUENCES = ("sequence_bias", "forced_decoder_ids", "force_words_ids")
"""Entries of a generation configuration with sequences of tokens that cannot be left out."""
_SUPPRESSED = ("suppress_tokens", "begin_suppress_tokens", "bad_words_ids")
"""Entries of a generation configuration with tokens that are never written."""


@dataclass(frozen=True, eq=False)
class VocabularyCut:
    """A cut vocabulary.

    Attributes:
        tokenizer: The tokenizer of the tokens that stay.
        kept: The former numbers (tokens,), int64, of the tokens that stay, in ascending order.
        rows: The number of rows that the embeddings had.
        size: The number of tokens that the tokenizer had.
        tokens: The number of tokens that it made of the text.
        proof: The numbers of strings that were tried: `text` and `unicode`, which both tokenizers
            decode to themselves, and `same_tokens`, of kept tokens alone, in both of which they are
            the same; the number of `tokens` on which logits were compared, and their largest
            difference, `logits`, which is 0 where both matrix products round alike.
    """

    tokenizer: Any
    kept: Tensor
    rows: int
    size: int
    tokens: int
    proof: Mapping[str, float]


def keep_tokens(
    model: PreTrainedModel, tokenizer: Any, size: int, documents: Sequence[str]
) -> VocabularyCut:
    """Keep only the tokens that a text needs in a causal language model, in place.

    All bytes, all added tokens and all that the configuration names stay, then those that the text
    has most often, each with the parts that it is merged of. Tokens of equal counts follow
    their numbers. Rows without a token go.

    Args:
        model: The model.
        tokenizer: Its tokenizer; it is not changed.
        size: The number of tokens to keep.
        documents: The text.

    Raises:
        OptionError: `size` is no smaller than the vocabulary, or too small for what has to stay.
        TargetError: The tokenizer has no tokens for bytes, or is of another kind; the model, its
            configuration or its tokenizer do not fit each other; or a proof fails: the smaller
            tokenizer loses a string, makes other tokens of it, or the logits of kept tokens differ.
            The model stays as it was.
        DataError: There is no text, or no string of it has kept tokens alone.
    """
    if not documents:
        raise DataError("there are no documents, whose tokens would be counted.", "vocabulary")
    vocabulary = require_cuttable(model, tokenizer, size)
    required = _named_by_configurations(model, vocabulary)
    counts = vocabulary.counts(documents)
    kept = vocabulary.chosen(size, counts, required)
    number = {old: new for new, old in enumerate(kept)}
    smaller = renumbered_tokenizer(tokenizer, vocabulary.cut(number), number)
    proof, window = prove_tokens(vocabulary, smaller, number, documents)
    ids, rows = torch.tensor(kept), _num_rows(model)
    logits = _cut_model(model, ids, number, torch.tensor([window[:_COMPARED]]))
    sizes = rows, len(vocabulary.tokens), counts.total()
    return VocabularyCut(smaller, ids, *sizes, {**proof, **logits})


def require_cuttable(model: PreTrainedModel, tokenizer: Any, size: int) -> Vocabulary:
    """Return the vocabulary of a tokenizer that can be cut to a number of tokens.

    Raises:
        OptionError: The number is not below that of the tokens.
        TargetError: The vocabulary cannot be cut, or not with this model; see `keep_tokens`.
    """
    vocabulary, rows = Vocabulary.of(tokenizer), _num_rows(model)
    if beyond := [repr(token) for number, token in vocabulary.tokens.items() if number >= rows]:
        raise cannot_cut(
            f"the tokenizer has {counted(len(beyond), 'token')} without an embedding, such as "
            f"{', '.join(beyond[:3])}; call "
            f"`model.resize_token_embeddings({max(vocabulary.tokens) + 1})`"
        )
    if not 0 < size < len(vocabulary.tokens):
        raise OptionError(
            f"the tokenizer has {len(vocabulary.tokens):,} tokens, so that fewer can stay, and at "
            f"least one. Got {size:,}.",
            "vocabulary",
        )
    used = _generation(model)
    if named := [name for name in _SEQUENCES if used.get(name)]:
        raise cannot_cut(
            f"its generation_config forces sequences of tokens by "
            f"{', '.join(f'`{name}`' for name in named)}. Set them to None"
        )
    return vocabulary


def _num_rows(model: PreTrainedModel) -> int:
    """Return the number of rows of the input embeddings."""
    embeddings = model.get_input_embeddings()
    assert isinstance(embeddings, nn.Module)
    weight = embeddings.weight
    assert isinstance(weight, Tensor)
    if getattr(model.config.get_text_config(), "vocab_size", None) != len(weight):
        raise cannot_cut(f"its configuration has no `vocab_size` that is {len(weight):,}")
    return len(weight)


def _generation(model: PreTrainedModel) -> dict[str, Any]:
    config = getattr(model, "generation_config", None)
    return {} if config is None else vars(config)


def _configurations(model: PreTrainedModel) -> list[Any]:
    """Return the configurations of a model that may name tokens."""
    config, generation = model.config, getattr(model, "generation_config", None)
    text = config.get_text_config()
    return [config, *([] if text is config else [text]), *filter(None, [generation])]


def _names_tokens(name: str, value: Any) -> bool:
    is_of_tokens = name.endswith(("_token_id", "_token_ids", "_token_index"))
    return is_of_tokens and not name.startswith("_") and isinstance(value, int | list | tuple)


def _named_by_configurations(model: PreTrainedModel, vocabulary: Vocabulary) -> set[int]:
    """Return the numbers of the tokens that the configurations of a model name.

    Numbers beyond the embeddings, such as −1, name no tokens.

    Raises:
        TargetError: One is that of a row of the embeddings without a token.
    """
    named = set[int]()
    for config in _configurations(model):
        for name, value in vars(config).items():
            if not _names_tokens(name, value):
                continue
            numbers = [value] if isinstance(value, int) else value
            inside = {n for n in numbers if 0 <= n < _num_rows(model)}
            if absent := inside - vocabulary.tokens.keys():
                raise cannot_cut(
                    f"`{name}` of its {type(config).__name__} is {min(absent)}, a row of the "
                    "embeddings without a token. Set it to None, or to the number of a token"
                )
            named |= inside
    return named


def _renumbered(value: Any, number: Mapping[int, int]) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(number.get(old, old) for old in value)
    return number.get(value, value)


def _of_configurations(model: PreTrainedModel, number: Mapping[int, int]) -> list[Attribute]:
    """Return the entries of a model's configurations that name tokens, with their new numbers."""
    entries: list[Attribute] = [
        (config, name, _renumbered(value, number))
        for config in _configurations(model)
        for name, value in vars(config).items()
        if _names_tokens(name, value)
    ]
    for name in _SUPPRESSED:
        if listed := _generation(model).get(name):
            kept = [
                [number[old] for old in each] if isinstance(each, list) else number[each]
                for each in listed
                if all(old in number for old in (each if isinstance(each, list) else [each]))
            ]
            entries.append((model.generation_config, name, kept or None))
    return [*entries, (model.config.get_text_config(), "vocab_size", len(number))]


def _rows(model: PreTrainedModel, kept: Tensor, entries: Sequence[Attribute]) -> list[Attribute]:
    """Return what changes in the modules of a model of fewer tokens, with the new values.

    The model is built twice without weights, by its configuration and by that of fewer tokens. The
    tensors that get shorter in one dimension are those with a row for each token.

    Raises:
        TargetError: The configuration does not describe the smaller model, or other tensors of it
            differ.
    """
    text = model.config.get_text_config()
    changed = {name: value for owner, name, value in entries if owner is text}
    try:
        dense, smaller = built(model, {}), built(model, changed)
    except UnfitError as unfit:
        raise cannot_cut(f"its configuration cannot say fewer tokens ({unfit})") from unfit
    size, rows = len(kept), dense.config.get_text_config().vocab_size
    shapes, fewer = (shapes_of(each, remove_duplicate=False) for each in (dense, smaller))
    modules = dict(model.named_modules())
    attributes: list[Attribute] = []
    made = dict[int, nn.Parameter | Tensor]()  # tied tensors stay tied
    for name, shape in shapes.items():
        if shape == (new := fewer.get(name)):
            continue
        dims = [d for d, (a, b) in enumerate(zip(shape, new or (), strict=False)) if a != b]
        is_of_tokens = new is not None and len(shape) == len(new) and len(dims) == 1
        if not is_of_tokens or (shape[dims[0]], fewer[name][dims[0]]) != (rows, size):
            raise cannot_cut(f"{name} would get another shape than one with {size:,} rows")
        path, _, key = name.rpartition(".")
        original = getattr(modules[path], key)
        if id(original) not in made:
            rest = original.detach().index_select(dims[0], kept.to(original.device))
            is_parameter = isinstance(original, nn.Parameter)
            made[id(original)] = (
                nn.Parameter(rest, requires_grad=original.requires_grad) if is_parameter else rest
            )
        attributes.append((modules[path], key, made[id(original)]))
    return [*attributes, *different_attributes(model, dense, smaller)]


@torch.no_grad()
def _cut_model(
    model: PreTrainedModel, kept: Tensor, number: Mapping[int, int], window: Tensor
) -> dict[str, float]:
    """Cut embeddings and head in place to the rows of kept tokens, and compare their logits.

    Args:
        model: The model.
        kept: The former numbers (tokens,) of the tokens that stay.
        number: The new number of each.
        window: The former numbers (1, tokens) of some of them.

    Returns:
        The number of `tokens`, and the largest difference of their `logits`.
    """
    was_training = model.training
    model.eval()

    def logits(ids: Tensor) -> Tensor:
        result: Any = model(input_ids=ids.to(model.device), use_cache=False)
        return result.logits

    entries = _of_configurations(model, number)
    changes = _rows(model, kept, entries)
    undo = ExitStack()
    try:
        whole = logits(window)
        expected = whole.index_select(-1, kept.to(whole.device))
        undo = set_attributes([*changes, *entries])
        output = logits(torch.tensor([[number[old] for old in window[0].tolist()]]))
        # A matrix product of fewer rows may be another kernel's, which sums in another order.
        allowed = _ROUNDING * torch.finfo(expected.dtype).eps * float(expected.float().norm())
        if output.shape != expected.shape or not float((output - expected).norm()) <= allowed:
            raise cannot_cut("the logits of kept tokens differ from those of the whole model")
        return {"tokens": window.shape[1], "logits": float((output - expected).abs().max())}
    except BaseException:
        undo.close()
        raise
    finally:
        model.train(was_training)
