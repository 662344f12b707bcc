"""The cut of a vocabulary in `mrp-lightning prune --vocabulary`, and what it costs."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from mrp_lightning.commands.numbers import memory, number
from mrp_lightning.commands.subject import Subject
from mrp_lightning.errors import TargetError, counted
from mrp_lightning.loop.causal_lm import CausalLM
from mrp_lightning.loop.vocabulary import cut_vocabulary
from mrp_lightning.narrowing.vocabulary import require_cuttable
from mrp_lightning.narrowing.words import Vocabulary
from mrp_lightning.records.evaluation import Scores
from mrp_lightning.terminal import Console
from mrp_lightning.text.windows import Windows


def cut_words(subject: Subject, size: int, console: Console) -> Scores:
    """Cut the vocabulary of a model in place to `size` words, and print what that costs.

    It is evaluated on the same bytes of held-out text before and after; the record of the module
    gets `held_out`. Returns the scores after the cut.

    Raises:
        OptionError: The number of words is out of range.
        TargetError: The model is no causal language model, or its vocabulary cannot be cut.
    """
    model, data = subject.model, subject.data
    if not isinstance(model, CausalLM):
        raise TargetError(
            f"`vocabulary`: a {type(model.model).__name__} predicts no next token, so that no "
            "head of it gives logits of words. Leave `--vocabulary` out."
        )
    model.tokenizer = data.tokenizer
    require_cuttable(model.model, model.tokenizer, size)
    sizes = [subject.num_bytes]
    subject.cut_windows()
    dense = _evaluate(subject, "dense model", console)
    console.print(f"Counting the words of {data.calibration_source} …")
    cut_vocabulary(model, size, data.documents("train"))
    data.tokenizer = model.tokenizer
    subject.windows = _of_as_many_bytes(subject, dense["bytes"] or 0)
    cut = _evaluate(subject, f"model of {size:,} words", console)
    model.vocabulary["held_out"] = {
        "bytes": [dense["bytes"], cut["bytes"]],
        **{key: [dense[key], cut[key]] for key in ("bytes_per_token", "bits_per_byte")},
    }
    sizes.append(subject.num_bytes)
    console.print(_table(model.vocabulary, sizes))
    console.print(_sentences(model.vocabulary, subject.text))
    return cut


def _evaluate(subject: Subject, state: str, console: Console) -> Scores:
    scores: Any = subject.evaluate(state, console)
    num_bytes = sum(_bytes(subject.windows, subject.model.tokenizer))
    return {
        **scores,
        "bytes": num_bytes,
        "bytes_per_token": num_bytes / scores["tokens"],
        "bits_per_byte": scores["loss"] * scores["tokens"] / math.log(2) / num_bytes,
    }


def _of_as_many_bytes(subject: Subject, num_bytes: float) -> Windows:
    """Return the windows of about as much of the text, of which there are more tokens now."""
    # Twice as many are more than enough where words of the text itself were kept.
    windows = subject.data.windows("test", 2 * len(subject.windows))
    rest, count = num_bytes, 0
    for size in _bytes(windows, subject.model.tokenizer):
        if rest < size / 2 and count:
            break
        rest, count = rest - size, count + 1
    return Windows(windows.ids[:count], windows.prefix)


def _bytes(windows: Windows, tokenizer: Any) -> list[int]:
    """Return the number of bytes of the predicted tokens of each window."""
    sizes = Vocabulary.of(tokenizer).num_bytes
    rows = windows.ids[:, windows.prefix + 1 :].tolist()
    return [sum(sizes[token] for token in row) for row in rows]


def _table(record: Mapping[str, Any], sizes: Sequence[int]) -> Table:
    """Return a table of a model of `sizes` bytes before and after the cut of its vocabulary."""
    rows, held_out = Table(), record["held_out"]
    rows.add_column("model", overflow="fold")
    for column in ("bits a byte", "bytes a token", "weights"):
        rows.add_column(column, justify="right")
    names = [f"{record['words']:,} words", f"{record['kept']:,} words"]
    figures = zip(names, held_out["bits_per_byte"], held_out["bytes_per_token"], sizes, strict=True)
    for name, bits, per_token, size in figures:
        rows.add_row(name, f"{bits:.4f}", f"{per_token:.3f}", memory(size))
    return rows


def _sentences(record: Mapping[str, Any], text: str) -> str:
    """Return sentences on what was measured, what it costs on other text, and what is proven."""
    held_out, proof = record["held_out"], record["proof"]
    times = {name: after / max(before, 1) for name, (before, after) in record["tokens"].items()}
    listed = ", ".join(f"{name} {number(factor)}" for name, factor in times.items())
    read, read_after = (f"{size:,}" for size in held_out["bytes"])
    exact = "to the bit" if not proof["logits"] else f"up to {proof['logits']:.2g} (rounding)"
    return (
        f"Bits a byte are those of the negative log-likelihood of {read} and then {read_after} "
        f"bytes of the {text}; perplexities of other words do not compare. "
        f"Tokens of other text, times those before: {listed}. Proven: "
        f"{counted(proof['text'] + proof['unicode'], 'string')} decode to themselves as before, "
        f"{proof['same_words']:,} of kept words have the same ones, and the logits of kept words "
        f"are equal {exact}."
    )
