"""Cut the vocabulary of a `CausalLM`, record what that costs, and save the result."""

import json
from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from mrp_ground.arguments import checked
from mrp_lightning.embedded import DECLARATION
from mrp_lightning.environment import command
from mrp_lightning.errors import OptionError
from mrp_lightning.loop.causal_lm import CausalLM
from mrp_lightning.loop.pruned_module import PrunedModule, check_save_dir
from mrp_lightning.narrowing.tokenizer import Vocabulary
from mrp_lightning.narrowing.vocabulary import keep_tokens
from mrp_lightning.records.grid_file import NAME as GRID
from mrp_lightning.records.grid_file import load_parameters
from mrp_lightning.records.report import PruningReport, pruned_before
from mrp_lightning.text.sources import StandardLibrary
from mrp_lightning.upstream.torch_names import uncompiled

_CHARACTERS = 2**18
"""The characters of Python's standard library whose tokens are counted."""


@checked
def cut_vocabulary(
    module: CausalLM,
    size: int,
    documents: Sequence[str],
    *,
    save_dir: str | PathLike[str] | None = None,
    overwrite: bool = False,
) -> dict[str, Any]:
    """Cut the vocabulary of a model in place to the tokens that a text needs most.

    All bytes, special and other added tokens stay, so that every text can still be written, by more
    tokens. No weight changes: the embeddings and the head lose rows. A pruning of the module after
    that is calibrated, and saves, with fewer tokens.

    Args:
        module: The module; its `model`, `tokenizer` and `vocabulary` change.
        size: The number of tokens to keep, fewer than the tokenizer has.
        documents: The text, such as `TextDataModule.documents("train")`.
        save_dir: The directory for the model with its `pruning_report.json`; `None` saves nothing.
        overwrite: Whether `save_dir` may be replaced, if this package wrote all of its content.

    Returns:
        The record, which `pruning_report.json` has as `vocabulary`; see `PruningReport`.

    Raises:
        OptionError: `size` is no smaller than the vocabulary, or too small for what has to stay; or
            the blocks of the model are streamed.
        TargetError: The vocabulary cannot be cut, or a proof fails; see `keep_tokens`. The model
            stays as it was.
        DataError: There is no text, or no string of it has kept tokens alone.
        FileExistsError: `save_dir` may not be replaced; `check_save_dir` raises more.
        SaveError: `save_dir` could not be written.
    """
    if module.streamed is not None:
        raise OptionError(
            "`vocabulary` compares the logits of two models in memory. Load the model without "
            "`streaming`, and stream what is saved."
        )
    if save_dir is not None:
        check_save_dir(save_dir, module, overwrite=overwrite)
    model: Any = uncompiled(module.model)
    weights = model.num_parameters()
    whole, cut = module.tokenizer, keep_tokens(model, module.tokenizer, size, documents)
    module.tokenizer = cut.tokenizer
    before, after = (Vocabulary.of(tokenizer) for tokenizer in (whole, cut.tokenizer))
    library = "".join(StandardLibrary().documents("test"))[:_CHARACTERS]
    elsewhere = {StandardLibrary().name: [library]}
    declaration = json.loads(DECLARATION.read_text("utf-8"))
    elsewhere |= {f"{name} (UDHR, article 1)": [text] for name, text in declaration.items()}
    module.vocabulary = {
        "size": cut.size,
        "kept": size,
        "rows": cut.rows,
        "model_weights": [weights, model.num_parameters()],
        "proof": dict(cut.proof),
        "tokens": {
            "the text": [cut.tokens, after.counts(documents).total()],
            **{
                name: [each.counts(text).total() for each in (before, after)]
                for name, text in elsewhere.items()
            },
        },
    }
    if save_dir is not None:
        save_cut(module, save_dir, overwrite=overwrite)
    return module.vocabulary


def save_cut(module: CausalLM, directory: str | PathLike[str], *, overwrite: bool) -> PruningReport:
    """Write a model whose vocabulary was cut, and nothing else of it; return its report."""
    model: Any = uncompiled(module.model)
    base_model = model.name_or_path
    earlier = pruned_before(base_model) if base_model else []
    report = PruningReport(
        config={"vocabulary": module.vocabulary["kept"], "base_model": base_model or None},
        provenance={"command": command(), **({"pruned_before": earlier} if earlier else {})},
        model_weights=module.vocabulary["model_weights"][0],
        vocabulary=module.vocabulary,
    )
    # The layers stay on the grid of an earlier run; embeddings and head lack rows of theirs.
    tables = (model.get_input_embeddings(), model.get_output_embeddings())
    known = load_parameters(Path(base_model, GRID)) if base_model else {}
    grid = {
        name: parameters
        for name, parameters in known.items()
        if model.get_submodule(name) not in tables
    }
    PrunedModule(module, report, grid, None).save(directory, overwrite=overwrite)
    return report
