"""A text of files to calibrate on, of which a tenth is held out to evaluate on."""

from collections.abc import Sequence

from mrp_lightning.data.data_module import TextDataModule
from mrp_lightning.text.standard_library import Split

_DOCUMENTS = 20  # from so many on, whole ones are held out


class HeldOutText(TextDataModule):
    """A `TextDataModule` that evaluates on a part of its `train_files`, and calibrates on the rest.

    Every tenth document is held out or, where there are few, the last tenth of each.
    """

    def documents(self, split: Split) -> Sequence[str]:
        """The texts of one split.

        Args:
            split: `train` is what is calibrated on; the other two are what is held out.

        Raises:
            DataError: The files are empty, or no text.
        """
        texts, is_training = super().documents("train"), split == "train"
        if len(texts) >= _DOCUMENTS:
            return [text for i, text in enumerate(texts) if (i % 10 != 9) == is_training]
        cuts = [_cut(text) for text in texts]
        return [t[:cut] if is_training else t[cut:] for t, cut in zip(texts, cuts, strict=True)]


def _cut(text: str) -> int:
    """Where the last tenth of a text begins: at a line, if one begins there."""
    place = len(text) * 9 // 10
    line = text.find("\n", place) + 1
    return line if 0 < line < len(text) - len(text) // 20 else place
