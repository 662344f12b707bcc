"""The cut of a vocabulary in `mrp-lightning prune --vocabulary`, and what it costs."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table
from torch.utils.data import DataLoader

from mrp_lightning.commands.numbers import memory, number
from mrp_lightning.data.data_module import TextDataModule
from mrp_lightning.errors import OptionError, TargetError, counted
from mrp_lightning.loop.causal_lm import CausalLM
from mrp_lightning.loop.text_model import TextModel
from mrp_lightning.loop.trainer import Trainer
from mrp_lightning.loop.vocabulary import cut_vocabulary
from mrp_lightning.narrowing.vocabulary import require_cuttable
from mrp_lightning.narrowing.words import Vocabulary
from mrp_lightning.records.evaluation import Scores
from mrp_lightning.terminal import Console
from mrp_lightning.text.windows import Windows


class VocabularyStep:
    """The cut of a model's vocabulary, evaluated on the same held-out text before and after.

    Args:
        model: The model.
        data: Its text, of files with a held-out part.
        size: The number of words to keep.
        windows: The largest number of windows to evaluate on.

    Raises:
        OptionError: There are no files, or the number of words is out of range.
        TargetError: The model is no causal language model, or its vocabulary cannot be cut.
    """

    def __init__(
        self, model: CausalLM | TextModel, data: TextDataModule, size: int, windows: int
    ) -> None:
        if not isinstance(model, CausalLM):
            raise TargetError(
                f"`vocabulary`: a {type(model.model).__name__} predicts no next token, so that no "
                "head of it gives logits of words. Leave `--vocabulary` out."
            )
        if not data.train_files:
            raise OptionError(
                "it keeps the words that a text needs. Give the text by `--text FILE`.",
                "vocabulary",
            )
        data.tokenizer = data.tokenizer or model.tokenizer
        model.tokenizer = data.tokenizer
        data.fit_to(model.model.config)
        require_cuttable(model.model, model.tokenizer, size)
        self.model, self.data, self.size = model, data, size
        self.windows = data.windows("test", windows)
        self.text = f"held-out part of {data.calibration_source}"

    def run(self, trainer: Trainer, console: Console) -> Scores:
        """Cut the vocabulary in place, and print what that costs; return the scores after it.

        The record of the module gets `held_out`.
        """
        model, data = self.model, self.data
        sizes = [sum(parameter.nbytes for parameter in model.parameters())]
        dense = self._evaluate(trainer, console, "dense model")
        console.print(f"Counting the words of {data.calibration_source} …")
        cut_vocabulary(model, self.size, data.documents("train"))
        data.tokenizer = model.tokenizer
        self.windows = self._of_as_many_bytes(dense["bytes"] or 0)
        cut = self._evaluate(trainer, console, f"model of {self.size:,} words")
        model.vocabulary["held_out"] = {
            "bytes": [dense["bytes"], cut["bytes"]],
            **{key: [dense[key], cut[key]] for key in ("bytes_per_token", "bits_per_byte")},
        }
        sizes.append(sum(parameter.nbytes for parameter in model.parameters()))
        console.print(_table(model.vocabulary, sizes))
        console.print(_sentences(model.vocabulary, self.text))
        return cut

    def _evaluate(self, trainer: Trainer, console: Console, subject: str) -> Scores:
        console.print(f"Evaluating the {subject} on the {self.text} …")
        loader = DataLoader(self.windows, batch_size=self.data.batch_size)
        trainer.test(self.model, dataloaders={self.text: loader}, verbose=False)
        (scores,) = self.model.evaluation.values()
        num_bytes = sum(_bytes(self.windows, self.model.tokenizer))
        nats = float(scores["loss"]) * int(scores["tokens"])
        return {
            **scores,
            "bytes": num_bytes,
            "bytes_per_token": num_bytes / int(scores["tokens"]),
            "bits_per_byte": nats / math.log(2) / num_bytes,
        }

    def _of_as_many_bytes(self, num_bytes: float) -> Windows:
        """Return the windows of about as much of the text, of which there are more tokens now."""
        # Twice as many are more than enough where words of the text itself were kept.
        windows = self.data.windows("test", 2 * len(self.windows))
        rest, count = num_bytes, 0
        for size in _bytes(windows, self.model.tokenizer):
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
