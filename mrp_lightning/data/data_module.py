"""Calibration and evaluation data from texts, as a LightningDataModule."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from mrp_ground.arguments import checked
from mrp_lightning.data.own_text import OwnText
from mrp_lightning.errors import DataError, OptionError
from mrp_lightning.loop.distributed import one_share_each
from mrp_lightning.models.checkpoint import longest_sequence
from mrp_lightning.models.loading import load_tokenizer
from mrp_lightning.text.documents import expanded, paths_of
from mrp_lightning.text.mixture import (
    SELF,
    Mixture,
    WindowSource,
    check_keys,
    shares_of,
    source_named,
    texts_by_name,
)
from mrp_lightning.text.sources import (
    CALIBRATION,
    EVALUATION,
    Bos,
    DatasetText,
    PublishedText,
    Split,
    StandardLibrary,
    TextFiles,
    TextSource,
    find_files,
)
from mrp_lightning.text.windows import Cutter, Windows

_Path = str | os.PathLike[str]
_USUAL_LENGTH = 2048  # tokens a window, in the papers
_SPLITS: dict[str, Split] = {"fit": "train", "predict": "train"}
_SPLITS |= {"validate": "validation", "test": "test"}
"""The split that a stage of the trainer reads."""


class TextDataModule(LightningDataModule):
    """Token windows of equal length: published texts, a dataset, files, or the model's own text.

    * `predict` draws each window at a random place of a random training document, to which the next
      documents are joined if it is shorter than a window. `fit` shuffles consecutive windows of the
      training documents; `validate` and `test` cut the evaluation text into consecutive windows,
      which do not overlap; the last partial one is dropped. Without any text the source code of the
      running Python's standard library is read, split by a hash of each file's path.
    * Published texts, which `calibration` and `evaluation` name, are read by the protocol of
      SparseGPT (lab/paper.md). `evaluation` gives a dictionary of dataloaders.
    * With `calibration="self"`, the model that `predict` runs writes the windows itself before it
      is pruned. The journal of the pruning keeps them (docs/self-calibration.md).

    Most windows start in the middle of a text and so lack the BOS of its start, which some families
    need. Therefore the tokens that the tokenizer adds at the start of a text are added to each
    window (`bos="window"`), except where a published protocol is followed. They count towards
    `sequence_length`, but neither they nor the first token after them are predicted: a batch for
    training or evaluation is then a mapping of `input_ids` and `labels`, −100 for these tokens.

    Args:
        train_files: Text for `predict` and `fit`: UTF-8 text files, a document each; .jsonl files,
            a document a line; tables (.json, .csv, .tsv, .parquet, .arrow), a document a row.
            A directory stands for all such files beneath it; wildcards are allowed. In .jsonl files
            and tables, a document is the text under `text_column`, or a conversation there, under
            `messages` or (ShareGPT's) `conversations`, which the tokenizer's chat template formats.
        eval_files: Files of the same kinds, for `validate` and `test`.
        dataset: A Hugging Face dataset with the splits train, validation and test: its name or
            directory, the arguments of `datasets.load_dataset` (such as `path` and `data_files`),
            or a loaded `DatasetDict`. Without a test split, `test` reads validation.
        calibration: The text for `predict`: a published one (c4, lambada, ptb, wikitext2); `self`,
            the model's own text; `stdlib`, Python's standard library; or a file. A mapping mixes
            several of these in given proportions, such as `{self: 0.5, c4: 0.5}`; its keys may also
            be `train_files` and `dataset`, for the text of those arguments.
        evaluation: Texts for `validate` and `test`: published ones (c4, ptb, wikitext2) and
            `stdlib`; or a mapping from names, which results use, to such texts or files, such as
            `{code: stdlib, mine: test.txt}`.
        hold_out: Whether `validate` and `test` read a tenth of `train_files`, which `predict` and
            `fit` then leave out: every tenth document or, of fewer than 20, the end of each.
        corpora_dir: Directory with local copies of the published texts, in the paths of their
            repositories (`allenai/c4/en/…`); nothing is fetched then. By default they come from
            the hub or, with `HF_HUB_OFFLINE=1`, from its cache.
        num_samples: Number of calibration windows.
        sequence_length: Tokens a window, the context at which perplexity is measured; at least 2.
            By default 2048, or the model's number of positions if that is less.
        bos: The place of the tokens that the tokenizer adds at the start of a text, usually BOS:
            once before each text that is cut into windows (`text`, the default for published texts,
            as in SparseGPT), or before every window (`window`, the default otherwise).
        batch_size: Windows a batch.
        seed: Seed of the draws of calibration windows, and of the order in which `fit` reads.
        text_column: Key of the text in .jsonl files, and its column in tables and datasets.
        tokenizer: A tokenizer, or the directory or hub id of one; by default that of the model.

    Raises:
        FileNotFoundError: Files do not exist; the message lists all. Published texts are looked for
            in `setup`; the message then gives the commands that download them.
        OptionError: A value has the wrong type, a number is too small, two arguments give the same
            text, a published text is unknown, or an argument lacks the text that it is about.
        DataError: In `setup` or when windows are made: there is no tokenizer, windows are longer
            than the model can read, or files hold too little text.
    """

    @checked
    def __init__(
        self,
        train_files: Sequence[_Path] | _Path | None = None,
        eval_files: Sequence[_Path] | _Path | None = None,
        dataset: str | dict[str, Any] | None = None,
        *,
        calibration: dict[str, float] | str | None = None,
        evaluation: dict[str, str] | Sequence[str] | str | None = None,
        hold_out: bool = False,
        corpora_dir: _Path | None = None,
        num_samples: int = 128,
        sequence_length: int | None = None,
        bos: Bos | None = None,
        batch_size: int = 1,
        seed: int = 0,
        text_column: str = "text",
        tokenizer: _Path | PreTrainedTokenizerBase | None = None,
    ) -> None:
        super().__init__()
        # All arguments are checked here, before a model is loaded.
        if bos not in (None, "text", "window"):
            raise OptionError(f"expected text or window. Got {bos!r}.", "bos")
        least = {"num_samples": (num_samples, 1), "batch_size": (batch_size, 1), "seed": (seed, 0)}
        if sequence_length is not None:
            least["sequence_length"] = sequence_length, 2  # a window of one token predicts nothing
        if mistakes := [
            f"`{name}` must be at least {few}; got {count}."
            for name, (count, few) in least.items()
            if count < few
        ]:
            raise OptionError(" ".join(mistakes))
        self.train_files, self.eval_files = paths_of(train_files), paths_of(eval_files)
        self.dataset, self.calibration = dataset, calibration
        self.evaluation = texts_by_name(evaluation)
        self._shares = None if calibration is None else shares_of(calibration)
        self.corpora_dir = Path(corpora_dir).expanduser() if corpora_dir is not None else None
        keys = ("train_files", "eval_files", "dataset", "calibration", "evaluation")
        check_keys(calibration, {key for key in keys if getattr(self, key)})
        if corpora_dir is not None and calibration is None and not self.evaluation:
            raise OptionError("it needs `calibration` or `evaluation`.", "corpora_dir")
        if hold_out and (self.eval_files or not self.train_files):
            raise OptionError("it needs `train_files`, and no `eval_files`.", "hold_out")
        # Both arguments are expanded in one call, so that one message lists all missing files.
        files = expanded({"train_files": self.train_files, "eval_files": self.eval_files})
        self._files = TextFiles(
            train=files["train_files"],
            evaluation=files["eval_files"],
            column=text_column,
            hold_out=hold_out,
            conversation=self._conversation,
        )
        published = [text for text in self.evaluation.values() if text in EVALUATION]
        # A published text alone means the paper's protocol, which evaluates on the same texts.
        self._is_alone = calibration in CALIBRATION
        of_paper = self._is_alone or (calibration is None and published)
        self.bos: Bos = bos or ("text" if of_paper else "window")
        self._bos, self.text_column = bos, text_column
        self.num_samples, self.batch_size, self.seed = num_samples, batch_size, seed
        self.sequence_length = sequence_length or _USUAL_LENGTH
        # A length of the user's is an error if the model cannot read it; the default is reduced.
        self._fits_model = sequence_length is None
        self._tokenizer: Any = tokenizer

    @property
    def tokenizer(self) -> Any:
        """The tokenizer of the argument, else of the model that the trainer runs; or `None`."""
        # It is loaded at its first use, since a hub id may need a network. The model's own is not
        # stored, as a restored checkpoint may replace it.
        if isinstance(self._tokenizer, str | os.PathLike):
            self._tokenizer = load_tokenizer(self._tokenizer)
        if self._tokenizer is not None:
            return self._tokenizer
        module = self.trainer.lightning_module if self.trainer else None
        return getattr(module, "tokenizer", None)

    @tokenizer.setter
    def tokenizer(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def _conversation(self, messages: list[dict[str, Any]]) -> str:
        """Return a conversation as the tokenizer's chat template writes it, without BOS."""
        tokenizer = self.tokenizer
        if getattr(tokenizer, "chat_template", None) is None:
            raise DataError(
                "the text holds conversations, and the model's tokenizer has no chat template. "
                "Name one that has, or give the conversations as text.",
                "tokenizer",
            )
        text: str = tokenizer.apply_chat_template(messages, tokenize=False)
        if not _holds_parts(text, messages):  # the template takes strings alone
            whole = [message | {"content": _joined(message)} for message in messages]
            text = tokenizer.apply_chat_template(whole, tokenize=False)
        return text.removeprefix(tokenizer.bos_token or "")  # `Cutter` adds it

    def fit_to(self, config: PreTrainedConfig) -> None:
        """Limit the length of the windows to the number of positions of a model.

        A DataError is raised if a `sequence_length` was given that is longer.
        """
        limit = longest_sequence(config)
        if self._fits_model:
            # From the usual length, not the present one: a module that was fitted to a short model
            # before is not limited by that for the next.
            self.sequence_length = min(_USUAL_LENGTH, limit or _USUAL_LENGTH)
        elif limit is not None and self.sequence_length > limit:
            raise DataError(
                f"the windows have {self.sequence_length} tokens, but the model's configuration "
                f"has only {limit} positions. Give {limit} or less.",
                "sequence_length",
            )

    def setup(self, stage: str) -> None:
        """Download the published texts of a stage, and limit the windows to the model's positions.

        Raises:
            DataError: Windows are longer than the model can read, or the stage has no text.
                `OwnText.writer` raises more.
            FileNotFoundError: Published texts are missing; the message has commands to download.
        """
        module = self.trainer.lightning_module if self.trainer else None
        config = getattr(getattr(module, "model", None), "config", None)
        if isinstance(config, PreTrainedConfig):
            self.fit_to(config)
        # The sources are examined here: a missing text is reported before any weight is changed.
        sources = self._sources(stage)
        for source in sources:
            if isinstance(source, OwnText):
                source.writer()
        published = [source for source in sources if isinstance(source, PublishedText)]
        find_files(published, _SPLITS[stage])
        if StandardLibrary() in sources:
            rank_zero_info(
                f"No text was given: `{getattr(stage, 'value', stage)}` reads the source code of "
                "Python's standard library. Other text is named by `train_files` and "
                "`eval_files`, `dataset`, or `calibration` and `evaluation`. "
                "With `calibration: self` the model writes the text to calibrate on itself."
            )

    def _sources(self, stage: str) -> list[WindowSource]:
        """Return the sources of the text that a stage reads."""
        if stage == "predict":
            return list(self._mixture().sources.values())
        if stage == "fit":
            return [self._text("train")]
        return list(self._evaluated(_SPLITS[stage]).values())

    def local_files(self, stage: str) -> list[Path]:
        """Return the files on this machine that `predict`, `fit`, `validate` or `test` reads."""
        sources = [source for source in self._sources(stage) if isinstance(source, TextSource)]
        return [file for source in sources for file in source.local_files(_SPLITS[stage])]

    def _mixture(self) -> Mixture:
        """Return the sources of the calibration windows."""
        if self._shares is None:
            if self.evaluation:
                raise DataError("`calibration` is needed here. Name published texts.")
            return Mixture({"": 1.0}, {"": self._text("train")})
        sources: dict[str, WindowSource] = {
            SELF: OwnText(self.trainer),
            "train_files": self._files,
            "dataset": DatasetText(self.dataset, self.text_column),
        }
        files, copies = self._files, self.corpora_dir
        sources = {n: sources.get(n) or source_named(n, files, copies) for n in self._shares}
        return Mixture(self._shares, sources)

    def _text(self, split: Split) -> TextSource:
        """Return the unnamed text of a split: the files, the dataset or the standard library."""
        # An unnamed text could be the standard library here, and its figures be taken for those of
        # the published text that the user named for another stage.
        if self._is_alone or self.evaluation:
            raise DataError(
                "`fit` trains on `train_files`, `dataset` or the embedded text, not on "
                "the published texts of `calibration` and `evaluation`."
                if split == "train"
                else "`evaluation` is needed here. Name published texts."
            )
        if self.dataset is not None and not self._files.of(split):
            return DatasetText(self.dataset, self.text_column)
        return self._files if self.train_files or self.eval_files else StandardLibrary()

    def _evaluated(self, split: Split) -> dict[str, TextSource]:
        """Return the texts to evaluate on, by name; an unnamed text has the name of its split."""
        if self.evaluation:
            files, copies = self._files, self.corpora_dir
            return {n: source_named(text, files, copies) for n, text in self.evaluation.items()}
        return {split: self._text(split)}

    @property
    def calibration_source(self) -> str:
        """The name of the calibration text; for files, their names without directories."""
        return self._mixture().name

    @property
    def own_windows(self) -> int:
        """The number of calibration windows that the model writes itself."""
        return self._mixture().counts(self.num_samples).get(SELF, 0)

    def predict_dataloader(self) -> DataLoader[Any]:
        """Return a loader of the `calibration_windows` in order, for each process its share.

        A batch is a tensor of token ids, int64 (batch_size, sequence_length).
        """
        return self._loader(self.calibration_windows())

    def train_dataloader(self) -> DataLoader[Any]:
        """Return a loader of the training text's consecutive windows, in a new order each epoch.

        A batch is a tensor of token ids, int64 (batch_size, sequence_length).
        """
        text = self._text("train")
        windows = self._cutter(text.bos).consecutive("train", text.documents("train"))
        # A generator of its own: the order depends on `seed` alone, not on earlier draws.
        order = torch.Generator().manual_seed(self.seed)
        return DataLoader(windows, batch_size=self.batch_size, shuffle=True, generator=order)

    def val_dataloader(self) -> DataLoader[Any] | dict[str, DataLoader[Any]]:
        """Return a loader of the validation text's consecutive windows, as `test_dataloader`.

        With `evaluation` there is one for each of its published texts, by name, of the test split:
        they have no validation text of their own here.
        """
        return self._evaluation_loaders("validation")

    def test_dataloader(self) -> DataLoader[Any] | dict[str, DataLoader[Any]]:
        """Return a loader of the test text's consecutive windows, for each process its share.

        A batch is a tensor of token ids, or a mapping of `input_ids` and `labels` of that shape,
        int64 (batch_size, sequence_length). With `evaluation` there is a loader for each text, by
        its name.
        """
        return self._evaluation_loaders("test")

    def _evaluation_loaders(self, split: Split) -> DataLoader[Any] | dict[str, DataLoader[Any]]:
        texts = self._evaluated(split).items()
        split = "test" if self.evaluation else split  # published texts have no validation
        windows = {name: text.windows(self._cutter(text.bos), split) for name, text in texts}
        loaders = {name: self._loader(each) for name, each in windows.items()}
        return loaders if self.evaluation else loaders[split]

    def calibration_windows(self) -> Tensor:
        """Return the calibration windows, at most (num_samples, sequence_length), int64.

        Windows are drawn at random; those of several sources are interleaved. If the model writes
        some of them, all processes must call this method. A text that is too short gives fewer or
        shorter windows, with a warning.

        Raises:
            DataError: There is no text or no tokenizer; or a text is too short, or its share less
                than a window. `OwnText.draw` raises more.
        """
        return self._mixture().draw(self._cutter(self.bos), self.num_samples, self.seed)

    def windows(self, split: Split, limit: int | None = None) -> Windows:
        """Return consecutive windows of the joined `documents`, at most `limit` (`None`: all).

        Their `ids` are (windows, sequence_length), int64. A text that is shorter than a window
        gives a single shorter one, with a warning; fewer than eight tokens raise a DataError.
        """
        text = self._text(split)
        return text.windows(self._cutter(text.bos), split, limit)

    def documents(self, split: Split) -> Sequence[str]:
        """Return the documents of one split of the dataset, the files or the standard library.

        Raises:
            DataError: The source has no such split, or it is empty; or the text is named, by
                `evaluation` or by a published `calibration`.
        """
        return self._text(split).documents(split)

    def _cutter(self, bos: Bos) -> Cutter:
        # Not cached: a checkpoint that Lightning restores after `setup` may replace the tokenizer.
        return Cutter(self.tokenizer, self.sequence_length, self._bos or bos)

    def _loader(self, windows: Any) -> DataLoader[Any]:
        share = one_share_each(windows, self.trainer)
        return DataLoader(windows, batch_size=self.batch_size, sampler=share)


def _holds_parts(text: str, messages: Sequence[dict[str, Any]]) -> bool:
    """Return whether the text of a conversation has all text parts of its messages as they are."""
    lists = [content for message in messages if isinstance(content := message.get("content"), list)]
    return all(
        str(content) not in text
        and all(str(part.get("text", "")).strip() in text for part in content)
        for content in lists
        if all(isinstance(part, dict) for part in content)
    )


def _joined(message: dict[str, Any]) -> Any:
    """Return the content of a message, text parts joined as one text."""
    content = message.get("content")
    if not isinstance(content, list):
        return content
    if others := sorted({str(part.get("type")) for part in content if "text" not in part}):
        raise DataError(
            f"a message has parts of the kinds {', '.join(others)}, and the tokenizer's chat "
            "template takes text alone. Leave these parts out."
        )
    return "\n".join(part["text"] for part in content)
