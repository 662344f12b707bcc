"""Published texts as token windows, by the protocol of SparseGPT."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from mrp_lightning.errors import DataError
from mrp_lightning.text.published import (
    CALIBRATION,
    CORPORA,
    EVALUATION,
    Corpus,
    Part,
    check_names,
    locate,
    read_documents,
)
from mrp_lightning.text.windows import (
    Draws,
    segments_of_documents,
    segments_of_text,
    tokenize,
)


@dataclass(frozen=True, kw_only=True)
class PublishedTexts:
    """The published texts that are asked for; false if there are none.

    Attributes:
        calibration: The name of the one to calibrate on, if any.
        evaluation: The names of those to measure perplexity on.
        directory: Where their files are; `None` for the hub and its cache.

    Raises:
        OptionError: A name is unknown.
    """

    calibration: str | None
    evaluation: Sequence[str]
    directory: Path | None

    def __post_init__(self) -> None:
        check_names([self.calibration] if self.calibration else [], CALIBRATION, "calibration")
        check_names(self.evaluation, EVALUATION, "evaluation")

    def __bool__(self) -> bool:
        return bool(self.calibration or self.evaluation)

    def locate(self, stage: str) -> None:
        """Find, or fetch, what a stage of the trainer reads.

        Raises:
            DataError: The stage has no text.
            FileNotFoundError: Files are missing; it gives the commands that download them.
        """
        locate(self._needed(stage), self.directory)

    def segments(self, tokenizer: Any, draws: Draws) -> Tensor:
        """Random windows (count, length) of the text to calibrate on, int64.

        Raises:
            DataError: There is no such text, or it is too short for a window.
            FileNotFoundError: Files are missing; it gives the commands that download them.
        """
        ((corpus, part),) = self._needed("predict")
        documents = self._documents(corpus, part)
        if part.separator is None:
            return segments_of_documents(documents, tokenizer, draws, corpus.name)
        tokens = tokenize(tokenizer, part.separator.join(documents))
        return segments_of_text(tokens, draws, corpus.name)

    def evaluation_text(self, name: str) -> tuple[str, int | None]:
        """A text that perplexity is measured on, and on how many of its first windows.

        Raises:
            OptionError: There is no such text.
            FileNotFoundError: Files are missing; it gives the commands that download them.
        """
        check_names([name], EVALUATION, "evaluation")
        corpus = CORPORA[name]
        part = corpus.evaluation
        assert part is not None
        assert part.separator is not None
        return part.separator.join(self._documents(corpus, part)), part.windows

    def _needed(self, stage: str) -> list[tuple[Corpus, Part]]:
        """The published texts that a stage reads, and which part of each."""
        if stage == "fit":
            raise DataError(
                "`fit` trains on `data.train_files`, `data.dataset` or the embedded text, not on "
                "the published texts of `data.calibration` and `data.evaluation`."
            )
        key, names = "evaluation", self.evaluation
        if stage == "predict":
            key, names = "calibration", [self.calibration] if self.calibration else []
        if not names:
            raise DataError(f"`data.{key}` is needed here. Name published texts.")
        corpora = [CORPORA[name] for name in names]
        return [(corpus, getattr(corpus, key)) for corpus in corpora]

    def _documents(self, corpus: Corpus, part: Part) -> Sequence[str]:
        (paths,) = locate([(corpus, part)], self.directory)
        return read_documents(corpus, part, paths)
