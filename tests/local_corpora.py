"""Small local copies of the published texts: their paths, columns and file formats."""

import gzip
import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest

WORDS = ["def", "return", "self", "in", "(", ")", ":", ",", ".", "<unk>", "7", "the", "of", "café"]


def sentence(draw: random.Random, words: int) -> str:
    return " ".join(draw.choices(WORDS, k=words))


def write_json(path: Path, texts: list[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(path, "wt", encoding="utf-8") as file:
        for i, text in enumerate(texts):
            row = {"text": text, "timestamp": f"2019-04-2{i % 10}T12:57:54Z", "url": f"http://{i}"}
            file.write(json.dumps(row) + "\n")


def write_parquet(path: Path, **columns: list[str]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path)


@pytest.fixture(scope="session")
def published() -> dict[str, list[str]]:
    """The documents by file."""
    draw = random.Random(3)
    lengths = [3, 40, 9, 200, 12, 75, 5, 31, 8, 120]
    parts = [sentence(draw, 30) for _ in range(60)]
    return {
        "wikitext2/train": ["", " = Title = \n", *parts, ""],
        "wikitext2/test": ["", " = Other = \n", *parts[::-1], ""],
        "ptb/train": [sentence(draw, 11) for _ in range(90)],
        "ptb/test": [sentence(draw, 12) for _ in range(80)],
        "c4/train": [sentence(draw, k) for k in lengths * 3],
        # 1100 are read, of which 256 windows are kept.
        "c4/validation": [sentence(draw, 6) for _ in range(1200)],
        "lambada/0": [sentence(draw, k) for k in lengths],
        "lambada/1": [sentence(draw, k) for k in lengths[::-1]],
    }


@pytest.fixture(scope="session")
def write_corpora(published) -> Callable[[Path, dict[str, str]], Path]:
    """Writes the texts under a directory, each in a given folder of it."""

    def write(directory: Path, folders: dict[str, str]) -> Path:
        at = {name: directory / folder for name, folder in folders.items()}
        if "wikitext2" in at:
            for split in ("train", "test"):
                path = at["wikitext2"] / f"wikitext-2-raw-v1/{split}-00000-of-00001.parquet"
                write_parquet(path, text=published[f"wikitext2/{split}"])
        if "ptb" in at:
            for split in ("train", "test"):
                path = at["ptb"] / f"penn_treebank/{split}/0000.parquet"
                write_parquet(path, sentence=published[f"ptb/{split}"])
        if "c4" in at:
            train, validation = "train.00000-of-01024", "validation.00000-of-00008"
            write_json(at["c4"] / f"en/c4-{train}.json.gz", published["c4/train"])
            write_json(at["c4"] / f"en/c4-{validation}.json.gz", published["c4/validation"])
        if "lambada" in at:
            for shard in (0, 1):
                texts = published[f"lambada/{shard}"]
                path = at["lambada"] / f"plain_text/train-0000{shard}-of-00002.parquet"
                write_parquet(path, text=texts, domain=["Romance"] * len(texts))
        return directory

    return write


@pytest.fixture(scope="session")
def corpora_dir(tmp_path_factory, write_corpora) -> Path:
    """As `hf download --local-dir DIR/OWNER/NAME` leaves it; lambada under its short name."""
    folders = {
        "wikitext2": "Salesforce/wikitext",
        "ptb": "ptb-text-only/ptb_text_only",
        "c4": "allenai/c4",
        "lambada": "lambada",
    }
    return write_corpora(tmp_path_factory.mktemp("corpora"), folders)
